"""The proof of a program: that it does what its collective promises, on any schedule, and cannot hang.

Four stages, each of which needs the one before it: every instruction makes sense by itself (`form`), every send has
its recv (`matching`), no rank touches the same elements twice at once (`races`), and a run on symbols (`machine`,
`contract`) ends with each rank's contribution exactly once wherever it is promised, in the same order of summation,
and with what codecs did not send kept exactly once (`conservation`).
"""

from dataclasses import dataclass

from penstock.errors import StrategyError
from penstock.program import Program
from penstock.program.composition import Composition
from penstock.verify.contract import check_conservation, check_contract
from penstock.verify.findings import Finding, Kind
from penstock.verify.form import check_form, find_races
from penstock.verify.machine import Carried, run_program
from penstock.verify.matching import match

__all__ = ["Carried", "Finding", "Kind", "Proof", "require_proof", "verify"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What `verify` found out about a program."""

    findings: tuple[Finding, ...]  # what is wrong; empty for a proved program
    steps: int  # time steps it took; 0 if it was not fit to run
    carried: tuple[Carried, ...]  # every message in the order of its step

    @property
    def proved(self) -> bool:
        """Say whether nothing is wrong."""
        return not self.findings


def verify(program: Program | Composition) -> Proof:
    """Prove a program, or an iteration of several for any moments at which they become ready; or say what is wrong."""
    composition = None
    if isinstance(program, Composition):
        composition, program = program, program.joined()
        for part in dict.fromkeys(composition.programs):  # each by itself; then that none keeps another from going on
            if not (proof := verify(part)).proved:
                return proof
    assert len(program.ranks) == program.world_size
    findings = check_form(program)
    if findings:
        return Proof(tuple(findings), 0, ())
    matching, findings = match(program)
    unmatched = bool(findings)
    findings += find_races(program)
    run = run_program(program, matching, composition)
    if not unmatched:  # else what the run finds are consequences
        findings += run.findings
    if not findings:
        findings = check_contract(program, run)
    if not findings and composition is None:
        findings = check_conservation(program, run)
    return Proof(tuple(run.dated(finding) for finding in findings), run.steps, run.carried)


def require_proof(program: Program) -> Proof:
    """Return the proof of `program`; raise `StrategyError` naming the first mistake where there is none."""
    proof = verify(program)
    if not proof.proved:
        raise StrategyError(f"{program.strategy} on {program.world_size} ranks: {proof.findings[0]}")
    return proof
