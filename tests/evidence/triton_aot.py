"""All forms of Triton's kernels compiled for every supported device, with the installed Triton and
the oldest: registers, shared memory, exact arithmetic."""

from __future__ import annotations

from typing import Any

from tests.ops.backends.triton_versions import (
    VERSIONS,
    compiled,
    faults,
    in_tf32,
    missing,
    to_a_total,
)

CAPABILITIES = ("80", "90", "100")


def run() -> dict[str, Any]:
    """Compile in processes of their own, which must not interpret."""
    absent = [reason for version in VERSIONS if (reason := missing(version)) is not None]
    results = [] if absent else [compiled(version, *CAPABILITIES) for version in VERSIONS]
    reports = [report for result in results for report in result["reports"]]
    wrong = [*absent, *faults(reports)]
    wrong += [
        f"{report['kernel']} in {report['call']} on sm_{report['capability']}: adds to a total or "
        "multiplies in tf32"
        for report in reports
        if to_a_total(report) or in_tf32(report)
    ]
    for result in results:
        wrong += [*result["failed"], *(f"no call launches {name}" for name in result["missing"])]
    return {
        "passed": bool(reports) and not wrong,
        "capabilities": [int(capability) for capability in CAPABILITIES],
        "versions": sorted({report["triton"] for report in reports}),
        "forms": len(reports),
        "kernels": largest(reports),
        "wrong": wrong,
    }


def largest(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kernel, version and device: how many forms, and the most that one of them takes."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for report in reports:
        names = ("triton", "module", "kernel", "capability")
        groups.setdefault(tuple(report[name] for name in names), []).append(report)
    return [
        {
            **dict(zip(("triton", "module", "kernel", "capability"), key, strict=True)),
            "forms": len(forms),
            **{
                name: max(form[name] for form in forms)
                for name in ("reg", "stack", "dynamic_shared")
            },
        }
        for key, forms in groups.items()
    ]
