"""Which instructions may run before the wait, on listings as nvdisasm prints them."""

from cubins import Kernel


def opcodes_before_the_wait(*lines):
    """The lines are instructions, or labels, which end with a colon."""
    body = "\n".join(line if line.endswith(":") else f"        /*0000*/  {line} ;" for line in lines)
    return [i.opcode for i in Kernel("kernel", body).before("ACQBULK")]


def test_a_wait_that_a_predicate_may_skip_is_none():
    assert "LDG.E" in opcodes_before_the_wait("@P0 ACQBULK", "LDG.E R0, [R2]", "ACQBULK", "EXIT")
    assert opcodes_before_the_wait("MOV R0, R1", "ACQBULK", "LDG.E R0, [R2]", "EXIT") == ["MOV"]


def test_branches_go_on_where_they_meet():
    lines = ["BSSY B0, `(.L_0)", "@P0 BRA `(.L_1)", "BSYNC B0", "LDG.E R0, [R2]", ".L_1:", "BSYNC B0", ".L_0:"]
    assert "LDG.E" not in opcodes_before_the_wait(*lines, "ACQBULK", "EXIT")


def test_a_barrier_that_was_kept_in_a_register_leads_to_every_meeting():
    inner = ["BMOV.32.CLEAR R3, B0", "BSSY B0, `(.L_1)", "BSYNC B0", ".L_1:", "BMOV.32 B0, R3"]
    lines = ["BSSY B0, `(.L_0)", *inner, "BSYNC B0", "ACQBULK", "EXIT", ".L_0:", "LDG.E R0, [R2]", "ACQBULK", "EXIT"]
    assert "LDG.E" in opcodes_before_the_wait(*lines)


def test_a_predicate_may_skip_where_branches_meet():
    lines = ["BSSY B0, `(.L_0)", "@P0 BSYNC B0", "LDG.E R0, [R2]", ".L_0:", "ACQBULK", "EXIT"]
    assert "LDG.E" in opcodes_before_the_wait(*lines)
