"""``dpkern privacy``: compute the epsilon of a planned run, claimed and certified."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

from ..base.errors import InvalidInput
from ..base.json import dumps
from ..base.validate import choice, integer, probability
from ..engine.demo.models import ALL_MODELS, build, example_rows
from ..engine.named import CALIBRATED_TO, MODES, NAMES, Run, make
from ..privacy import accounting
from ..privacy.accounting import shown_bound
from ..privacy.mechanisms import LabelMechanism, Mechanism, ObjectivePerturbation
from ..privacy.theory.adlm import AdlmSetting
from ..train import (
    adlm_mechanism,
    display,
    label_privacy,
    moments_mechanism,
    objective_mechanism,
)
from ..train.adlm_options import MODELS, LabelledOptions
from ..train.moments_options import SumsOptions
from ..train.objective_options import RecordOptions
from ..train.options import ARITHMETICS, CLIPPINGS

OF_OBJECTIVES = ("mechanism", "mode", "settings", "epsilon", "steps", "json")
"""Options of a mechanism that perturbs a loss."""
OF_ADLM = (*OF_OBJECTIVES, "model", "row_shape", "classes", "sample_rate", "dataset_size")
"""Options of AdLM, whose noise follows from the sizes of network and data too."""
OF_SUMS = ("mechanism", "mode", "settings", "epsilon", "delta", "row_shape", "classes", "json")
"""Options of a release of sums, whose size follows from the rows' and labels'."""
OF_KIND = {"records": OF_OBJECTIVES, "labelled rows": OF_ADLM, "sums of rows": OF_SUMS}
OBJECTIVES = {
    kind.name: OF_KIND[kind.trained_by]
    for kind in ObjectivePerturbation.all()
    if kind.trained_by is not None
}
"""Mechanisms without sampled steps, and their options."""
OF_RECORDS, OF_LABELLED = RecordOptions.in_words(), LabelledOptions.in_words()


def command(
    context: typer.Context,
    sample_rate: Annotated[
        float | None,
        typer.Option(help=f"Expected batch size / number of rows; not with {OF_RECORDS}."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Number of steps; with {OF_RECORDS}, {OF_LABELLED}: visits of each record."
        ),
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise scale / clipping bound.")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Target instead of a noise multiplier: print the least noise that meets it. In "
            "published modes it is the target of the claim."
        ),
    ] = None,
    delta: Annotated[
        float, typer.Option(help="The delta of (epsilon, delta): well below 1 / number of rows.")
    ] = 1e-5,
    sampling: Annotated[
        str, typer.Option(help=f"One of {', '.join(accounting.SAMPLING)}.")
    ] = "poisson",
    dataset_size: Annotated[
        int | None,
        typer.Option(help=f"Number of rows; needed by fixed sampling, {OF_LABELLED}."),
    ] = None,
    mechanism: Annotated[
        str, typer.Option(help=f"One of {', '.join(sorted((*NAMES, *OBJECTIVES)))}.")
    ] = "dpsgd",
    mode: Annotated[
        str, typer.Option(help=f"One of {', '.join(MODES)}; published has the paper's claim.")
    ] = "corrected",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE: a field of the mechanism; may be repeated."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model, for mechanisms that depend on layers: one of "
            f"{', '.join(ALL_MODELS)}. With {OF_LABELLED}: {', '.join(MODELS)}."
        ),
    ] = None,
    row_shape: Annotated[
        str | None, typer.Option(help="Shape of one row of that model, such as 1,28,28.")
    ] = None,
    classes: Annotated[int, typer.Option(help="Number of classes of the labels.")] = 10,
    linear: Annotated[str, typer.Option(help="dense or circulant, in a paper's model.")] = "dense",
    clipping: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(CLIPPINGS)}.", show_default="the mechanism's"),
    ] = None,
    arithmetic: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(ARITHMETICS)}.", show_default="the mechanism's"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Print claimed and certified epsilon of a planned run, or the noise that it needs."""
    integer(2, classes=classes)
    if mechanism in OBJECTIVES:
        _refuse_others(context, mechanism)
        choice(MODES, mode=mode)
        given: dict[str, Any] = {"mode": mode, "settings": settings or (), "epsilon": epsilon}
        if OBJECTIVES[mechanism] is OF_SUMS:
            _print_objective(_of_sums(mechanism, given, delta, row_shape, classes), json)
            return
        visits = integer(1, visits=1 if steps is None else steps)
        if OBJECTIVES[mechanism] is OF_OBJECTIVES:
            local = objective_mechanism.make(mechanism, **given)
            facts = objective_mechanism.facts(local, visits=visits, seeded=False)
        else:
            sizes = _sizes(model, row_shape, classes, dataset_size, sample_rate)
            released = adlm_mechanism.make(mechanism, setting=sizes, **given)
            facts = adlm_mechanism.facts(released, visits=visits, seeded=False)
            facts["sizes"] = asdict(sizes)
        _print_objective(facts, json)
        return
    if sample_rate is None or steps is None:
        passed = {"--sample-rate": sample_rate, "--steps": steps}
        given_alone = [f"{name} {value}" for name, value in passed.items() if value is not None]
        raise InvalidInput(
            "--sample-rate, --steps",
            expected=f"both with mechanism {mechanism}",
            got=", ".join(given_alone) or "neither",
            remedy="Pass both: dpkern privacy --sample-rate 0.01 --steps 1000 --epsilon 2",
        )
    if (epsilon is None) == (noise_multiplier is None):
        raise InvalidInput(
            "epsilon, noise_multiplier",
            expected="exactly one of them",
            got="neither" if epsilon is None else "both",
            remedy="Pass --noise-multiplier to get an epsilon, or --epsilon to get the noise.",
        )
    network: nn.Module | None = None
    rows: tuple[int, ...] = ()
    if model is not None:
        rows = _shape(row_shape) if row_shape is not None else example_rows(model)
        network = build(model, row_shape=rows, classes=classes, linear=linear)
    size = round(1 / sample_rate) if dataset_size is None else dataset_size
    made, open_noise = make(
        mechanism,
        Run(
            model=network,
            row_shape=rows,
            classes=classes,
            steps=steps,
            sample_rate=sample_rate,
            rows=size,
            batch_size=max(1, round(sample_rate * size)),
            delta=delta,
        ),
        mode=mode,
        settings=tuple(settings or ()),
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        # Groups share the bound as layers do: what holds for every number of layers holds for them.
        clipping="per_layer" if clipping == "group" and model is None else clipping,
        arithmetic=arithmetic,
    )
    run: dict[str, Any] = {
        "sample_rate": sample_rate,
        "steps": steps,
        "delta": delta,
        "sampling": sampling,
        "dataset_size": dataset_size,
    }
    if isinstance(made, LabelMechanism):
        _print_response(made, json)
        return
    shapes = None if network is None else [tuple(p.shape) for p in network.parameters()]
    if open_noise:
        assert epsilon is not None
        dimension = None if shapes is None else sum(map(math.prod, shapes))
        made = accounting.calibrate(
            made, to=CALIBRATED_TO[mode], target_epsilon=epsilon, dimension=dimension, **run
        )
    _print(made, run, None if epsilon is None else CALIBRATED_TO[mode], shapes, json)


def _print(
    mechanism: Mechanism,
    run: dict[str, Any],
    target: str | None,
    shapes: list[tuple[int, ...]] | None,
    as_json: bool,
) -> None:
    """Print the table of a mechanism whose steps spend."""
    released = mechanism if shapes is None else mechanism.plan(shapes)
    certificate = accounting.certify(released, batched=True, **run).to_dict()
    sizes = {name: run[name] for name in ("dataset_size", "sample_rate")}
    warning = accounting.delta_warning(run["delta"], **sizes)
    result: dict[str, Any] = {
        "mechanism": mechanism.name,
        "mode": mechanism.mode,
        "noise_multiplier": mechanism.noise_multiplier,
        "epsilon_claimed": accounting.claimed_epsilon(mechanism, **run),
        "claim": mechanism.claim_text,
        "epsilon_certified": certificate.pop("epsilon"),
        "calibrated_to": target,
        "warnings": [] if warning is None else [warning],
        **run,
        **certificate,
    }
    _show(result, as_json)


def _print_response(mechanism: LabelMechanism, as_json: bool) -> None:
    """Print the cost of one response for each record; steps, sampling and delta do not count."""
    facts = label_privacy.report(mechanism, seeded=False)
    certificate = facts.pop("certificate")
    wanted = ("mechanism", "mode", "epsilon_claimed", "claim")
    shown = {name: facts[name] for name in wanted}
    shown |= {"epsilon_certified": certificate.pop("epsilon"), **certificate}
    _show(shown | {"notes": ["steps and sampling spend nothing more"]}, as_json)


def _refuse_others(context: typer.Context, mechanism: str) -> None:
    """Refuse given options that do not apply to a mechanism without sampled steps."""
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if (
            source is not None
            and source.name == "COMMANDLINE"
            and name not in OBJECTIVES[mechanism]
        ):
            raise InvalidInput(
                name,
                expected=f"none: {mechanism} has no such option",
                got=value,
                remedy=f"Leave --{name.replace('_', '-')} out.",
            )


def _sizes(
    model: str | None, row_shape: str | None, classes: int, rows: int | None, rate: float | None
) -> AdlmSetting:
    """Return what the noise of AdLM and ILM follows from, for a run that is not started."""
    if model is None or rows is None or rate is None:
        raise InvalidInput(
            "model, dataset_size, sample_rate",
            expected=f"all three: the noise of {OF_LABELLED} follows from them",
            got=f"model {model}, dataset_size {rows}, sample_rate {rate}",
            remedy="Pass --model, --dataset-size and --sample-rate.",
        )
    rows, rate = integer(1, dataset_size=rows), probability(sample_rate=rate)
    return adlm_mechanism.planned_setting(
        model,
        None if row_shape is None else _shape(row_shape),
        classes=classes,
        records=rows,
        batch=max(1, round(rate * rows)),
    )


def _of_sums(
    mechanism: str, given: dict[str, Any], delta: float, row_shape: str | None, classes: int
) -> dict[str, Any]:
    """Return the facts of a release of sums that is not made."""
    if row_shape is None:
        raise InvalidInput(
            "row_shape",
            expected=f"the shape of one row with {SumsOptions.in_words()}",
            got="none",
            remedy="Pass --row-shape, such as 8,8: the number of released sums follows from it.",
        )
    sized: dict[str, Any] = {
        "delta": delta,
        "row_shape": _shape(row_shape),
        "classes": classes,
    }
    made, feature_map = moments_mechanism.make(mechanism, **given, **sized)
    return moments_mechanism.facts(made, feature_map, seeded=False)


def _print_objective(facts: Mapping[str, Any], as_json: bool) -> None:
    """Print what one record pays, with public bounds of its features."""
    wanted = ("mechanism", "mode", "epsilon_claimed", "claim", "epsilon_certified", "non_private")
    some = ("visits", "epsilon_of_target_alone", "epsilon_by_part", "sizes")
    shown = {name: facts[name] for name in (*wanted, *some) if name in facts}
    certificate = {**facts["certificate"], "settings": facts["settings"]}
    del certificate["epsilon"]
    _show(shown | certificate, as_json)


def _show(result: dict[str, Any], as_json: bool) -> None:
    warnings = result.get("warnings", [])
    display.print_warnings(Console(stderr=True), warnings)
    if as_json:
        print(dumps(result), flush=True)
        return
    elsewhere = ("bounds", "notes", "event", "settings", "epsilon_by_part", "sizes", "warnings")
    plain = [
        (name.replace("_", " "), _rounded_up(name, value))
        for name, value in result.items()
        if value is not None and name not in elsewhere
    ]
    parts = result.get("epsilon_by_part", {}).items()
    plain += [(f"epsilon of {name}", shown_bound(value)) for name, value in parts]
    sizes = result.get("sizes", {})
    plain += [(name, sizes[name]) for name in ("records", "batch", "classes") if name in sizes]
    bounds = [(f"bound by {name}", shown_bound(v)) for name, v in result["bounds"].items()]
    notes = [("warning", text) for text in warnings]
    notes += [("note", note) for note in result["notes"] if note not in warnings]
    display.print_table(Console(), "Privacy of the planned run", [*plain, *bounds, *notes])


def _rounded_up(name: str, value: Any) -> Any:
    """Round privacy and the noise that it takes as bounds; leave everything else as it is."""
    bound = name.startswith("epsilon") or name in ("delta", "noise_multiplier")
    return shown_bound(value) if bound else value


def _shape(text: str) -> tuple[int, ...]:
    """Parse ``1,28,28`` as numbers."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InvalidInput(
            "row_shape",
            expected="positive numbers with commas, such as 1,28,28",
            got=text,
            remedy="Pass the shape of one row, for example --row-shape 1,28,28.",
        )
    return tuple(int(part) for part in parts)
