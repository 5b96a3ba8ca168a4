"""The faults of fault_matrix.py: each is done to one system for real, and what came of it is looked at."""

from __future__ import annotations

import os
import pickle
import resource
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import torch
from fault_cell import Cell, Outcome, Verdict, differs, wait_until, worst
from fault_crew import Answer, Crew
from fault_states import UNITS

from resilient.testing.processes import full_disk
from resilient.testing.proxy import FaultProxy, HttpFault, HttpRule

_TRIGGER_TIMEOUT_S = 60.0
_SETTLE_S = 1.0
_LARGE_NBYTES = 1 << 16
_BOMBED_FILES = 8


def not_applicable(why: str) -> Verdict:
    return Verdict(outcome=Outcome.NOT_APPLICABLE, detail=why)


# Processes that die ---------------------------------------------------------------------------------------------------


def rank_killed(cell: Cell) -> Verdict:
    """One rank, with all that it has started, killed while files are being written; the others are waited for."""
    victim = 0 if cell.kind.gathers else 1
    verdicts, step, reported = [], 0, 0
    for _ in range(cell.setting.tries):
        with cell.crew() as crew:
            crew.first_save(step + 1)
            reported, step = step + 1, step + 2
            said = kill_mid_save(cell, crew, step, step, victim)
            survivor = crew.hear()[1 - victim]
        said += f", the other rank {survivor}"
        with cell.crew() as crew:
            verdict = cell.restart(crew, (reported, step), reported).after(said)
        if survivor.how == "hangs":
            verdict = Verdict(outcome=Outcome.HANGS, detail=f"{said}; the deadline was {crew.deadline_s:g} s")
        verdicts.append(verdict)
        if verdict.outcome is not Outcome.HOLDS:
            break
    return worst(verdicts)


def all_killed(cell: Cell) -> Verdict:
    """All ranks killed at a random moment while step after step is saved; in turns with all that they have started."""
    verdicts, step, reported = [], 0, 0
    for life in range(cell.setting.random_kills + 1):
        with cell.crew() as crew:
            if step:
                verdicts.append(cell.restart(crew, range(reported, step + 1), reported))
                if verdicts[-1].outcome is not Outcome.HOLDS:
                    break
            if life == cell.setting.random_kills:
                break
            begin_s = time.monotonic()
            crew.first_save(step + 1)
            took_s, reported = time.monotonic() - begin_s, step + 1
            crew.tell("save_many", step + 2, 6)
            time.sleep(cell.rng.uniform(0, 4 * took_s))
            crew.kill(orphans=life % 2 == 1)
            crew.hear()
            reported = max([reported, *crew.notes])
            step = reported + 1
            if life % 2 == 1:  # who was left behind may go on while the next life begins
                time.sleep(cell.rng.uniform(0, _SETTLE_S))
                crew.forget_orphans()
    return worst(verdicts).after(f"{len(verdicts)} kills in {step} steps, every other one leaving writers behind")


def overwriting(cell: Cell) -> Verdict:
    """Steps 1 and 2 saved; then back to step 1, on to a new step 2, and all killed while that is saved."""
    verdicts = []
    for number in range(cell.setting.tries):
        cell.use(url=str(cell.folder / f"place-{number}"))
        with cell.crew() as crew:
            for step in (1, 2):
                crew.first_save(step)
        with cell.crew() as crew:
            crew.must(crew.ask("restore", 1, [1]))
            said = kill_mid_save(cell, crew, 2, 102)
            refused = [each for each in crew.hear() if each.how == "raised"]
        if refused:
            said = f"the save is refused ({refused[0].value})"
        with cell.crew() as crew:
            gone = "step 2, which was saved, is gone"
            verdicts.append(cell.restart(crew, (1, 2, 102), 1, gone=gone).after(said))
    return worst(verdicts)


def writer_killed(cell: Cell) -> Verdict:
    """The process that saves killed while it does; the save is waited for, and two more are tried."""
    if "process" not in cell.kind.modes:
        return not_applicable("no process of its own")
    cell.use(mode="process")
    with cell.crew() as crew:
        crew.first_save(1)
        writers = crew.writers(0)
        if not writers:
            return not_applicable("no process of its own")
        started = crew.ask("start", 2, 2)
        for each in writers:
            os.kill(each, 9)
        ended = crew.ask("wait") if all(each.how == "ok" for each in started) else started
        said = [f"the save {_of_ranks(ended)}"]
        reported = [1] + [2] * all(each.how == "ok" for each in ended)
        hung = any(each.how == "hangs" for each in ended)
        for step in (3, 4):
            if not hung:
                again = crew.ask("save", step, step)
                hung = any(each.how == "hangs" for each in again)
                reported += [step] * all(each.how == "ok" for each in again)
                said.append(f"save {step} {_of_ranks(again)}")
    text = ", ".join(said)
    with cell.crew() as crew:
        verdict = cell.restart(crew, range(reported[-1], 5), reported[-1]).after(text)
    if verdict.outcome is Outcome.HOLDS and hung:
        return Verdict(outcome=Outcome.HANGS, detail=f"{text}; the deadline was {crew.deadline_s:g} s")
    if verdict.outcome is Outcome.HOLDS and not {3, 4} & set(reported):
        return Verdict(outcome=Outcome.NO_MORE, detail=verdict.detail)
    return verdict


def kill_mid_save(cell: Cell, crew: Crew, step: int, value: int, *victims: int) -> str:
    """Let the ranks save, and kill some, none named: all, when a random part of the bytes is in files."""
    before, aimed = cell.files(), crew.aim(*victims)
    wanted = cell.rng.uniform(0.02, 0.6) * cell.step_nbytes
    crew.tell("save", step, value)
    wait_until(lambda: crew.answered() or cell.written_nbytes(before) > wanted, _TRIGGER_TIMEOUT_S)
    over = crew.answered()
    crew.kill(*victims, aimed=aimed)
    part = min(1.0, cell.written_nbytes(before) / cell.step_nbytes)
    return f"killed {'after' if over else 'in'} the save, {part:.0%} written"


def _of_ranks(answers: list[Answer]) -> str:
    """Say what the ranks said, once if they agree."""
    said = {str(each) if each.how == "raised" else each.how for each in answers}
    return " / ".join(sorted(said))


# Stored data that changes ---------------------------------------------------------------------------------------------


def flipped_bit(cell: Cell) -> Verdict:
    """One bit of the newest step's largest file is another one."""

    def flip(path: Path, part: float) -> None:
        with path.open("r+b") as file:
            file.seek(int(part * path.stat().st_size))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1 << cell.rng.randrange(8)]))

    return damaged(cell, flip)


def truncated(cell: Cell) -> Verdict:
    """The newest step's largest file is cut."""
    return damaged(cell, lambda path, part: os.truncate(path, int(part * path.stat().st_size)))


def lost(cell: Cell) -> Verdict:
    """The newest step's largest file is gone."""
    return damaged(cell, lambda path, _: path.unlink())


def damaged(cell: Cell, damage: Callable[[Path, float], None]) -> Verdict:
    victims = two_saves(cell)
    # Of equals, the one that a restart reads: Lightning's last.ckpt comes before step=2.ckpt.
    victim = min(victims, key=lambda path: (-path.stat().st_size, path.name))
    content, verdicts = victim.read_bytes(), []
    for part in (0.6, 0.3, 0.9)[: cell.setting.tries]:
        victim.unlink(missing_ok=True)
        victim.write_bytes(content)
        damage(victim, part)
        with cell.crew() as crew:
            verdicts.append(cell.restart(crew, (1, 2), 1).after(f"in {victim.name}"))
    return worst(verdicts)


def two_saves(cell: Cell) -> list[Path]:
    """Save steps 1 and 2; return the files that came with the second."""
    with cell.crew() as crew:
        crew.first_save(1)
        before = cell.files()
        crew.first_save(2)
        new = [path for path, found in cell.files().items() if differs(found, before.get(path))]
    return [path for path in new if path.is_relative_to(cell.where.url)]


class Bomb:
    """What unpickles to a new file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._mark), "w")


def pickle_bomb(cell: Cell) -> Verdict:
    """Each file of the newest step replaced in turn: by a pickle, and by a file of `torch.save`, that runs code."""
    victims = sorted(two_saves(cell))[:_BOMBED_FILES]
    mark, ran, hung, tries = cell.folder / "it-ran", [], [], 0
    for victim in victims:
        content = victim.read_bytes()
        packed = BytesIO()
        torch.save({"model": Bomb(mark), "optim": Bomb(mark)}, packed)
        for kind, bomb in (("a pickle", pickle.dumps(Bomb(mark))), ("torch.save", packed.getvalue())):
            victim.write_bytes(bomb)
            with cell.crew() as crew:
                answers = crew.ask("restore", None, [1, 2])
            tries += 1
            name = f"{victim.name} as {kind}"
            ran += [name] if mark.exists() else []
            hung += [name] if any(answer.how == "hangs" for answer in answers) else []
            mark.unlink(missing_ok=True)
        victim.write_bytes(content)
    if ran:
        return Verdict(outcome=Outcome.RUNS_CODE, detail=f"{len(ran)} of {tries} bombs ran, {ran[0]} among them")
    if hung:
        return Verdict(outcome=Outcome.HANGS, detail=f"{hung[0]}")
    with cell.crew() as crew:
        return cell.restart(crew, (1, 2), 1).after(f"none of {tries} bombs ran")


# Places that are full or away -----------------------------------------------------------------------------------------


def full_in_helper(cell: Cell) -> Verdict:
    """A disk that becomes full within a save, in several ways; every step that is reported saved must load."""
    verdicts = [_limited(cell)]
    for part in (0.2, 0.7, 0.95)[: cell.setting.tries]:
        with full_disk(12 * cell.step_nbytes) as place:
            if place.how != "mount":
                break
            cell.use(url=str(place.path / "place"))
            with cell.crew() as crew:
                crew.first_save(1)
                place.fill(but_nbytes=int(part * cell.step_nbytes))
                full = crew.ask("save", 2, 2)
                place.clear()
                verdicts.append(_after_full(cell, crew, full, f"room for {part:.0%} of a step"))
    return worst(verdicts)


def _limited(cell: Cell) -> Verdict:
    """No file may become longer than what the smaller half of a rank's tensors takes (RLIMIT_FSIZE)."""
    share = cell.step_nbytes if cell.kind.gathers else cell.step_nbytes // 2
    limit = int(9.5 / UNITS * share)
    cell.use(url=str(cell.folder / "limited"))
    with cell.crew() as crew:
        crew.first_save(1)
        trees = [each for rank in range(crew.ranks) for each in crew.tree(rank)]
        for each in trees:
            resource.prlimit(each, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        full = crew.ask("save", 2, 2)
        for each in trees:
            if Path(f"/proc/{each}").exists():
                resource.prlimit(each, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return _after_full(cell, crew, full, "room for one of two threads")


def _after_full(cell: Cell, crew: Crew, full: list[Answer], said: str) -> Verdict:
    return _after_failing(cell, crew, full, f"{said}: the save {_of_ranks(full)}")


def _after_failing(cell: Cell, crew: Crew, ended: list[Answer], said: str) -> Verdict:
    """Judge a save of step 2 that may have failed, as ``said``: can step 3 be saved, and what does a restart find?"""
    reported = [1] + [2] * all(each.how == "ok" for each in ended)
    if any(each.how == "hangs" for each in ended):
        return Verdict(outcome=Outcome.HANGS, detail=f"{said}; the deadline was {crew.deadline_s:g} s")
    again = crew.ask("save", 3, 3)
    saved = all(each.how == "ok" for each in again)
    if not saved:
        said += f", the next {_of_ranks(again)}"
    crew.close()
    loads = cell.all_reported(reported[saved:])  # the oldest may have been rotated out by then
    if loads.outcome is not Outcome.HOLDS:
        return loads.after(said)
    with cell.crew() as fresh:
        verdict = cell.restart(fresh, (3,) if saved else (reported[-1], 3), reported[-1]).after(said)
    if verdict.outcome is Outcome.HOLDS and not saved:
        return Verdict(outcome=Outcome.NO_MORE, detail=verdict.detail)
    return verdict


def store_away(cell: Cell) -> Verdict:
    """The store answers 503 to everything from the start of a save on, for some time."""

    def away(proxy: FaultProxy, crew: Crew) -> None:
        proxy.use(HttpRule(fault=HttpFault.SLOW_DOWN))
        crew.tell("save", 2, 2)
        time.sleep(cell.setting.outage_s)

    return _through_proxy(cell, away)


def expired(cell: Cell) -> Verdict:
    """Credentials expire in the first large upload of a save; they are renewed when it is over, or after some time."""

    def expire(proxy: FaultProxy, crew: Crew) -> None:
        begun = len(proxy.requests)
        slow = HttpRule(fault=HttpFault.DELAY, delay_s=0.5, min_nbytes=_LARGE_NBYTES)
        proxy.use(slow)
        crew.tell("save", 2, 2)
        wait_until(lambda: any(each.nbytes >= _LARGE_NBYTES for each in proxy.requests[begun:]), _TRIGGER_TIMEOUT_S)
        proxy.use(HttpRule(fault=HttpFault.EXPIRED))
        wait_until(crew.answered, cell.setting.outage_s)

    return _through_proxy(cell, expire)


def _through_proxy(cell: Cell, fault: Callable[[FaultProxy, Crew], None]) -> Verdict:
    if not cell.kind.remote:
        return not_applicable("it saves to file systems only")
    server = cell.setting.server
    with FaultProxy(server.endpoint, seed=cell.setting.seed) as proxy:
        options = {**server.options(), "endpoint_url": proxy.url}
        cell.use(url=server.fresh_url(), options=options, patience_s=2 * cell.setting.outage_s + 20)
        with cell.crew() as crew:
            crew.first_save(1)
            fault(proxy, crew)
            befallen = sum(proxy.injected.values())
            proxy.use()
            ended = crew.hear()
            after_s = max(each.after_s for each in ended)
            said = f"{befallen} requests were refused, the save {_of_ranks(ended)} ({after_s:.0f} s)"
            return _after_failing(cell, crew, ended, said)


# Saves that meet something else ---------------------------------------------------------------------------------------


def other_world_size(cell: Cell) -> Verdict:
    """A save of two ranks killed within; one rank goes on and saves the same step; two ranks restore that."""
    if not cell.kind.reshards:
        return not_applicable("its resharding needs a GPU")
    verdicts = []
    for number in range(cell.setting.tries):
        cell.use(url=str(cell.folder / f"place-{number}"))
        with cell.crew() as crew:
            crew.first_save(1)
            said = kill_mid_save(cell, crew, 2, 2)
        with cell.crew(1) as crew:
            verdict = cell.restart(crew, (1, 2), 1).after(said)
            if verdict.outcome is not Outcome.HOLDS or "step 2" in verdict.detail:
                verdicts.append(verdict)
                continue
            again = crew.ask("save", 2, 102)
            said += f", one rank saves the step again: {_of_ranks(again)}"
        with cell.crew() as crew:
            fine = (102,) if again[0].how == "ok" else (1, 102)
            verdicts.append(cell.restart(crew, fine, 1).after(said))
    return worst(verdicts)


def changed_after_save(cell: Cell) -> Verdict:
    """All parameters overwritten as soon as the call that saves returns."""
    how = "thread" if "thread" in cell.kind.modes else "sync"
    cell.use(mode=how)
    reported = []
    with cell.crew() as crew:
        crew.first_save(1)
        for step in range(2, 2 + cell.setting.tries):
            ended = crew.ask("save_and_change", step, step, 77)
            reported += [step] * all(each.how == "ok" for each in ended)
    said = f"the save is {'synchronous' if how == 'sync' else 'asynchronous'}"
    if cell.kind.fence:
        said += f", and {cell.kind.fence}, which its documentation asks for, was not held"
    if not reported:
        return Verdict(outcome=Outcome.HOLDS, detail=f"the save {_of_ranks(ended)}")
    return cell.all_reported(reported[-2:]).after(said)


def latest_in_flight(cell: Cell) -> Verdict:
    """Another process asks again and again for the newest step while steps are saved, and loads what it is told."""
    cell.use(mode="thread" if "thread" in cell.kind.modes else "sync")
    verdicts: list[Verdict] = []
    with cell.crew() as crew, cell.crew() as reader:
        crew.first_save(1)
        for step in range(2, 3 + cell.setting.tries):
            crew.tell("save", step, step)
            over = False
            while not over:
                over = crew.answered()
                verdicts.append(_looked(cell, reader, step))
                if verdicts[-1].outcome is not Outcome.HOLDS:
                    crew.hear()
                    return verdicts[-1].after(f"look {len(verdicts)}")
            crew.must(crew.hear())
    return Verdict(outcome=Outcome.HOLDS, detail=f"{len(verdicts)} looks during saves, each loads what it is told")


def _looked(cell: Cell, reader: Crew, step: int) -> Verdict:
    answers = reader.ask("latest")
    told = min((answer.value for answer in answers if answer.how == "ok" and answer.value is not None), default=None)
    if told is None:
        said = f"the newest step is asked for: {answers[0]}, {answers[0].value}"
        return Verdict(outcome=Outcome.AT_LOAD, detail=said)
    found = cell.one(reader.ask("restore", told, [step, step - 1, *range(1, 10)]))
    if isinstance(found, Verdict):
        return found.after(f"step {told or step} is named while it is written" if told in (0, step) else f"step {told}")
    if found < step - 1:
        return Verdict(outcome=Outcome.LOST, detail=f"step {found} is named newest, although {step - 1} was saved")
    return Verdict(outcome=Outcome.HOLDS, detail=f"step {found}")


FAULTS: dict[str, tuple[str, Callable[[Cell], Verdict]]] = {
    "rank killed": ("rank killed mid-save", rank_killed),
    "all killed": ("all killed at a random moment", all_killed),
    "overwriting": ("crash while overwriting the same step", overwriting),
    "flipped bit": ("one flipped bit in stored data", flipped_bit),
    "truncated": ("truncated object", truncated),
    "lost": ("lost object", lost),
    "disk full": ("disk full, also in a helper thread only", full_in_helper),
    "writer killed": ("writer process killed", writer_killed),
    "store away": ("store answers 503 for a while", store_away),
    "expired": ("credentials expire mid-upload", expired),
    "world size": ("another world size retries the step after a torn attempt", other_world_size),
    "changed": ("parameters changed right after the save returned", changed_after_save),
    "latest": ("latest asked while a save is in flight", latest_in_flight),
    "pickle bomb": ("pickle bomb in the stored files", pickle_bomb),
}
