"""The test files of ``make test`` that take longest, with their CPU seconds, longest first."""

from __future__ import annotations

LONGEST = {
    "tests/engine/test_guard_loops.py": 39,
    "tests/ops/test_ops.py": 30,
    "tests/ops/conformance/test_conformance.py": 26,
    "tests/audit/test_audit_loop.py": 25,
    "tests/privacy/accounting/test_accounting.py": 21,
    "tests/engine/test_engine_compiled.py": 20,
    "tests/ops/test_ghost_conv.py": 18,
    "tests/engine/test_engine_api.py": 15,
    "tests/engine/test_engine_distributed.py": 14,
    "tests/privacy/accounting/test_subsets.py": 14,
    "tests/audit/test_golden.py": 13,
    "tests/engine/test_guard_false_alarms.py": 13,
    "tests/cli/test_cli.py": 13,
    "tests/audit/test_audit_plan.py": 12,
    "tests/audit/test_audit_corpus.py": 10,
    "tests/audit/test_audit.py": 10,
    "tests/ops/backends/test_numba.py": 9,
    "tests/engine/test_engine_program.py": 9,
    "tests/audit/test_certificate.py": 9,
    "tests/ops/test_compile.py": 9,
    "tests/ops/test_precision.py": 9,
    "tests/ops/test_coef.py": 9,
    "tests/ops/test_ghost_affine.py": 9,
    "tests/engine/test_engine_provenance.py": 8,
    "tests/ops/test_torch_library.py": 8,
    "tests/ops/backends/test_cuda_kernels.py": 8,
    "tests/engine/test_engine_allocator.py": 7,
    "tests/ops/test_coef_features.py": 7,
    "tests/ops/backends/test_direct.py": 7,
    "tests/train/test_train_mechanisms.py": 7,
}
"""They start first: a process that comes to one last would leave the other one idle."""
