"""The reader of machine code finds loops, pipes, widths and local memory."""

from __future__ import annotations

from benchmarks import machine_code

SASS = """
	code for sm_90
		Function : first
        /*0000*/                   S2R R0, SR_TID.X ;                   /* 0x0000 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;     /* 0x0000 */
        /*0020*/                   FFMA R8, R4, R5, R8 ;                /* 0x0000 */
        /*0030*/              @!P0 LDG.E.U16 R9, desc[UR4][R2.64+0x2] ; /* 0x0000 */
        /*0040*/                   DFMA R10, R10, R12, R10 ;            /* 0x0000 */
        /*0050*/               @P1 BRA 0x20 ;                           /* 0x0000 */
        /*0060*/                   UIADD3 UR4, UR4, 0x1, URZ ;          /* 0x0000 */
        /*0070*/               @P2 BRA 0x10 ;                           /* 0x0000 */
        /*0080*/                   STL [R1], R0 ;                       /* 0x0000 */
        /*0090*/                   BRA 0x90;                            /* 0x0000 */
		Function : second
        /*0000*/                   MUFU.RSQ R0, R1 ;                    /* 0x0000 */
        /*0010*/                   FMUL.FTZ R0, R0, R1 ;                /* 0x0000 */
        /*0020*/                   EXIT ;                               /* 0x0000 */
"""


def test_kernels_loops_and_what_is_outside() -> None:
    first, second = machine_code.kernels(SASS)
    assert (first.name, second.name, len(first), len(second)) == ("first", "second", 10, 3)
    outer, inner = first.loops
    assert (len(outer), len(inner)) == (7, 4)
    assert outer.holds(inner)
    assert not inner.holds(outer)
    assert [len(loop) for loop in first.outermost] == [7]
    assert [len(loop) for loop in first.innermost] == [4]
    assert [one.base for one in first.outside.instructions] == ["S2R", "STL", "BRA"]
    assert second.loops == []


def test_pipes_widths_and_local_memory() -> None:
    first, second = machine_code.kernels(SASS)
    assert first.pipes == {
        "alu": 1, "lsu": 3, "fma": 1, "fp64": 1, "control": 3, "uniform": 1,
    }  # fmt: skip
    assert first.widths("LDG") == {16: 1, 2: 1}
    assert [machine_code.scalar_loads(loop) for loop in first.loops] == [1, 1]
    assert (first.local, second.local) == (1, 0)
    assert first.flushing == []
    assert second.flushing == ["FMUL.FTZ R0, R0, R1"]
    assert second.pipes == {"xu": 1, "fma": 1, "control": 1}


def test_a_loop_without_products_is_no_product_loop() -> None:
    first, second = machine_code.kernels(SASS)
    assert machine_code.product_loop(first) is None
    assert machine_code.product_loop(second) is None
    product = "/*{:04x}*/ DFMA R10, R10, R12, R10 ;\n"
    loop = "".join(product.format(16 * i) for i in range(8)) + "/*0080*/ @P0 BRA 0x0 ;\n"
    (found,) = machine_code.kernels(loop)
    assert machine_code.product_loop(found) == found.loops[0]
