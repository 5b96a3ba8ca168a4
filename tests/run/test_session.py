"""The loop: where a run continues, what it saves and when, and what it refuses."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import resilient
from resilient.errors import ConflictError, ErrorKind, NotFoundError, StoreError, UsageError
from resilient.run.restored import Restored
from resilient.run.sampler import ElasticSampler
from resilient.run.session import Run
from resilient.store.memory import MemoryStore

LENGTH, BATCH = 40, 8  # five steps make an epoch


class Stop(Exception):  # noqa: N818 -- it is no error
    """What ends a run in the middle, as a failure would."""


class Rows(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rows = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(5)).double()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + 0.01 * torch.randn(4).double()  # an augmentation: draws from the global generator


class Training:
    """A small training with everything in it that a resume could get wrong; records what happened."""

    def __init__(self, place: object, **settings: Any) -> None:
        self.place = place
        self.settings: dict[str, Any] = {"every": 3, **settings}
        self.seen: dict[int, list[float]] = {}
        self.restored: Restored | None = None
        self.digest = ""
        self.step = 0

    def __call__(
        self,
        total: int | None = 12,
        *,
        during: Callable[[Run], None] = lambda run: None,
        data: Callable[[ElasticSampler], Any] = lambda sampler: DataLoader(Rows(), batch_sampler=sampler),
    ) -> Training:
        @resilient.train(self.place, **self.settings)  # type: ignore[arg-type]  # a place is whatever the test says
        def main(run: Run) -> None:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3)).double()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
            sampler = ElasticSampler(LENGTH, global_batch=BATCH, seed=1)
            self.restored = run.track(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)
            torch.randn(3)  # what the program draws between track and the first step is not the run's
            for batch in run.steps(data(sampler), total=total):
                self.step = run.step
                during(run)
                self.seen[run.step] = batch.flatten().tolist()
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                scheduler.step()
            self.step = run.step
            self.digest = _digest(model, optimizer)

        main()
        return self

    def saved(self) -> list[int]:
        return [found.step for found in resilient.checkpoints(self.place)]  # type: ignore[arg-type]  # as above


def _digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256(str(optimizer.param_groups[0]["lr"]).encode())
    for parameter in model.parameters():
        for tensor in (parameter, *(value for _, value in sorted(optimizer.state[parameter].items()))):
            digest.update(tensor.detach().double().numpy().tobytes())
    return digest.hexdigest()


def stop_at(step: int, error: BaseException | None = None) -> Callable[[Run], None]:
    def during(run: Run) -> None:
        if run.step == step:
            run.save().wait(30)
            raise error or Stop

    return during


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("whole"))()


@pytest.mark.parametrize("step", [0, 1, 4, 5, 6, 10, 11])
@pytest.mark.field_report("BR-126", "BR-127", "BR-129")
def test_a_resume_is_bitwise_the_uninterrupted_run(step: int, whole: Training, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        Training(tmp_path)(during=stop_at(step))
    again = Training(tmp_path)()
    assert again.restored is not None
    assert again.restored.step == step
    assert again.restored.world_size == 1
    assert {"model", "optimizer", "scheduler", "data"} <= set(again.restored.items)
    assert again.seen == {at: batch for at, batch in whole.seen.items() if at >= step}
    assert (again.step, again.digest) == (12, whole.digest)


@pytest.mark.parametrize("step", [5, 6])
def test_a_resume_from_a_save_of_the_policy_is_bitwise_too(step: int, whole: Training, tmp_path: Path) -> None:
    def fail(run: Run) -> None:
        if run.step == step:
            raise Stop

    with pytest.raises(Stop):
        Training(tmp_path, every=1)(during=fail)
    again = Training(tmp_path)()
    assert again.restored is not None
    assert again.restored.step <= step
    assert (again.step, again.digest) == (12, whole.digest)


def test_a_pass_without_total_ends_with_the_epoch_also_after_a_resume(tmp_path: Path) -> None:
    assert sorted(Training(tmp_path / "one")(None).seen) == [0, 1, 2, 3, 4]
    with pytest.raises(Stop):
        Training(tmp_path / "two")(None, during=stop_at(3))
    assert sorted(Training(tmp_path / "two")(None).seen) == [3, 4]


@pytest.mark.parametrize("every", [1, 3, 5, 1000])
@pytest.mark.parametrize("total", [None, 5])
@pytest.mark.field_report("BR-225")
def test_a_rerun_of_a_finished_run_says_so_and_does_nothing(
    total: int | None, every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resilient")
    Training(tmp_path, every=every)(total)
    saved = Training(tmp_path).saved()
    again = Training(tmp_path)(total)
    assert (again.seen, again.step, again.saved()) == ({}, 5, saved)
    assert "nothing to do: the run is complete at step 5" in caplog.messages
    assert sorted(Training(tmp_path)(7).seen) == [5, 6]  # until someone asks for more


def test_a_normal_end_saves_the_last_step_once(tmp_path: Path) -> None:
    assert Training(tmp_path / "a", every=1000)().saved() == [12]
    assert Training(tmp_path / "b", every=1000)(during=stop_now_and_then()).saved()[:1] == [12]


def stop_now_and_then() -> Callable[[Run], None]:
    def during(run: Run) -> None:
        if run.step in (4, 8):
            first = run.save("checkpoint")
            assert run.save() is first  # the same step is not saved twice
            run.fence()
            first.staged.result(30)

    return during


def test_explicit_saves_are_never_left_out(tmp_path: Path) -> None:
    def during(run: Run) -> None:
        run.save()

    assert Training(tmp_path, every=1000, keep=resilient.Keep(last=100))(during=during).saved() == [*range(12, -1, -1)]


def test_what_was_restored_is_saved_already(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        Training(tmp_path)(during=stop_at(4))

    def during(run: Run) -> None:
        if run.step == 4:
            assert run.save().committed.result(0) == 4

    Training(tmp_path)(during=during)


def loop(
    place: Path, body: Callable[[Run, torch.nn.Module, torch.optim.Optimizer, Any], None], **settings: Any
) -> None:
    @resilient.train(place, **{"every": 1000, **settings})
    def main(run: Run) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ElasticSampler(20, global_batch=2, seed=0)
        run.track(model=model, optimizer=optimizer, data=sampler)
        body(run, model, optimizer, sampler)

    main()


@pytest.mark.field_report("BR-126")
def test_a_save_within_a_step_is_refused_with_the_reason(tmp_path: Path) -> None:
    def body(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
        for _ in run.steps(sampler, total=2):
            optimizer.zero_grad()
            run.save()
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(UsageError, match="no optimizer step has used") as caught:
                run.save()
            assert caught.value.kind is ErrorKind.NOT_A_BOUNDARY
            optimizer.step()
            with pytest.raises(UsageError, match="the optimizer has stepped since"):
                run.save()

    loop(tmp_path, body)


def test_between_micro_batches_a_save_waits_for_the_next_boundary(tmp_path: Path) -> None:
    def body(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
        for _ in run.steps(sampler, total=12):
            if run.step % 4:
                with pytest.raises(UsageError, match="no optimizer step has used"):
                    run.save()
            model(torch.ones(1, 2)).sum().backward()
            if run.step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    loop(tmp_path, body, every=3, keep=resilient.Keep(last=100))
    steps = [found.step for found in resilient.checkpoints(tmp_path)]
    assert steps
    assert all(step % 4 == 0 for step in steps), steps


@pytest.mark.parametrize("after", ["nothing", "backward", "step"])
def test_a_loop_that_is_left_by_break_saves_no_half_step(after: str, tmp_path: Path) -> None:
    states = {}

    def body(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
        for _ in run.steps(sampler, total=10):
            if run.step == 3 and after == "nothing":
                break
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if run.step == 3 and after == "backward":
                break
            optimizer.step()
            states[run.step + 1] = model.weight.detach().clone()  # type: ignore[operator]  # a Linear's weight is a tensor
            if run.step == 3:
                break

    with contextlib.nullcontext() if after != "backward" else pytest.raises(SystemExit) as caught:
        loop(tmp_path, body)
    assert caught is None or caught.value.code == 3, "the last step is not saved, and the exit code does not say it"
    found = resilient.checkpoints(tmp_path)
    assert [each.step for each in found] == {"nothing": [3], "backward": [], "step": [4]}[after]
    for each in found:
        assert torch.equal(each.tensor("model.weight"), states[each.step])


def test_data_that_is_empty_twice_is_an_error_instead_of_a_loop_without_end(tmp_path: Path) -> None:
    def body(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
        with pytest.raises(UsageError, match="yielded nothing in 2 passes, at step 3 of 10"):
            list(run.steps((i for i in range(3)), total=10))

    loop(tmp_path, body)


@pytest.mark.field_report("BR-115")
def test_data_without_a_position_begins_anew_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilient")
    seen: list[int] = []

    @resilient.train(tmp_path, every=1)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        for batch in run.steps(range(4), total=6):
            seen.append(batch)
            if run.step == 5 and len(seen) < 7:
                run.save().wait(30)
                raise Stop

    with pytest.raises(Stop):
        main()
    assert "the position in the data is not restored" not in caplog.text
    main()
    assert seen == [0, 1, 2, 3, 0, 1, 0]
    assert "the position in the data is not restored" in caplog.text


class Counting:
    """A loader that keeps its own position, and draws from the global generator."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 8:
            self.position += 1
            yield self.position + 100 * int(torch.randint(1000, ()))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("wrap", [lambda loader: loader, resilient.PerRank], ids=["plain", "per_rank"])
@pytest.mark.parametrize("stop", [1, 5, 9])
def test_a_loader_with_a_position_of_its_own_draws_the_batch_again(
    wrap: Callable[[Counting], object], stop: int, tmp_path: Path
) -> None:
    def main(place: Path, stop: int) -> list[int]:
        seen: list[int] = []

        @resilient.train(place, every=1000)
        def body(run: Run) -> None:
            torch.manual_seed(3)
            loader = Counting()
            run.track(loader=wrap(loader), state={"w": torch.zeros(1)})
            for batch in run.steps(loader, total=12):
                if run.step == stop:
                    run.save().wait(30)
                    raise Stop
                seen.append(batch)

        with contextlib.suppress(Stop):
            body()
        return seen

    assert main(tmp_path / "b", stop) + main(tmp_path / "b", -1) == main(tmp_path / "a", -1)


def test_the_sampler_of_the_data_must_be_tracked(tmp_path: Path) -> None:
    @resilient.train(tmp_path)
    def main(run: Run) -> None:
        with pytest.raises(UsageError, match="nothing is tracked"):
            run.steps([1])
        run.track(state={"w": torch.zeros(1)})
        with pytest.raises(UsageError, match="is not tracked"):
            run.steps(DataLoader(Rows(), batch_sampler=ElasticSampler(LENGTH, BATCH, 0)))
        with pytest.raises(UsageError, match="called before"):
            run.track(more={})

    main()


def test_the_data_must_be_in_the_order_of_the_tracked_sampler(tmp_path: Path) -> None:
    @resilient.train(tmp_path)
    def main(run: Run) -> None:
        sampler = ElasticSampler(LENGTH, BATCH, 0)
        run.track(state={"w": torch.zeros(1)}, data=sampler)
        for shuffle in (True, False):
            with pytest.raises(UsageError, match="order of its own") as caught:
                run.steps(DataLoader(Rows(), batch_size=BATCH, shuffle=shuffle))
            assert "batch_sampler=sampler" in str(caught.value.hint)
        assert len(list(run.steps(DataLoader(Rows(), batch_sampler=list(sampler)), total=2))) == 2  # perhaps a wrapper

    main()


def test_what_cannot_be_saved_is_named_at_track(tmp_path: Path) -> None:
    @resilient.train(tmp_path)
    def main(run: Run) -> None:
        run.track(state={"deep": {"hook": lambda: 0}})

    with pytest.raises(UsageError, match=r"deep\.hook.*function"):
        main()


@pytest.mark.field_report("BR-002")
def test_items_that_differ_from_the_checkpoint_are_all_named(tmp_path: Path) -> None:
    def main(**items: object) -> None:
        @resilient.train(tmp_path)
        def body(run: Run) -> None:
            run.track(**items)
            list(run.steps([1, 2]))

        body()

    main(kept={"w": torch.zeros(2)}, gone={"x": torch.zeros(1)})
    with pytest.raises(UsageError) as caught:
        main(kept={"w": torch.zeros(3)}, new={"y": torch.zeros(1)})
    assert caught.value.kind is ErrorKind.MISMATCH
    assert all(word in str(caught.value) for word in ("gone", "new", "kept.w"))


def test_resume_says_what_happens_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        Training(tmp_path / "none", resume="required")()
    assert caught.value.exit_code == 10
    Training(tmp_path / "run")()
    fresh = Training(tmp_path / "run", resume="never")()
    assert fresh.restored is None
    assert min(fresh.seen) == 0


def test_a_second_launch_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    def during(run: Run) -> None:
        if run.step == 2:
            with pytest.raises(ConflictError, match="process") as caught:
                Training(tmp_path)()
            assert caught.value.kind is ErrorKind.RUN_IN_USE

    Training(tmp_path)(during=during)
    assert Training(tmp_path)().step == 12  # the first has ended, in this very process


def test_a_launch_that_is_taken_over_stops_at_once_and_nothing_that_it_saves_later_is_listed(tmp_path: Path) -> None:
    def take_over(run: Run) -> None:
        if run.step == 4:
            run.save().wait(30)
            newer()
        elif run.step > 4:
            run.save().committed.exception(30)

    def newer() -> None:
        assert Training(tmp_path, takeover=True, every=1000)(total=6).step == 6

    older = Training(tmp_path, every=1000)
    with pytest.raises(ConflictError, match="generation 2 has taken over") as caught:
        older(total=100, during=take_over)
    assert caught.value.kind is ErrorKind.TAKEN_OVER
    assert caught.value.exit_code
    assert older.step == 5, "it went on, although nothing that it saves counts"
    assert [(each.step, each.generation) for each in resilient.checkpoints(tmp_path)] == [(6, 2), (4, 1)]


class Failing(MemoryStore):
    """A store that stops taking data."""

    def __init__(self) -> None:
        super().__init__("failing")
        self.failing = False
        self.refused = 0

    def put(self, key: str, parts: Any) -> None:
        self._refuse(key)
        super().put(key, parts)

    def create(self, key: str, data: bytes) -> bool:
        self._refuse(key)
        return super().create(key, data)

    def _refuse(self, key: str) -> None:
        if self.failing and key.startswith(("data/", "steps/")):
            self.refused += 1
            raise StoreError("the disk is full", kind=ErrorKind.NO_SPACE)


def failing_from(store: Failing, step: int, until: int = 10_000) -> Callable[[Run], None]:
    def during(run: Run) -> None:
        store.failing = step <= run.step < until

    return during


@pytest.mark.field_report("BR-044")
def test_a_failing_save_never_hurts_training_and_is_never_silent(
    whole: Training, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resilient")
    store = Failing()
    done = Training(store, every=1, max_failed_saves=100)(during=failing_from(store, 2, until=9))
    assert store.refused
    assert (done.step, done.digest) == (12, whole.digest)
    assert done.saved()[0] == 12
    assert "the disk is full" in caplog.text
    assert "failed" in caplog.messages[-1]


def test_too_many_failed_saves_in_a_row_end_the_run_loudly() -> None:
    store = Failing()
    training = Training(store, every=1, max_failed_saves=2)

    def during(run: Run) -> None:
        run.save().committed.exception(30)
        store.failing = run.step >= 2

    with pytest.raises(StoreError, match="2 saves in a row failed; the newest committed step is") as caught:
        training(total=100, during=during)
    assert caught.value.kind is ErrorKind.SAVE_FAILED
    assert "the disk is full" in str(caught.value.__cause__)
    assert training.step < 12


def test_a_state_that_cannot_be_saved_for_a_while_fails_saves_and_no_step(tmp_path: Path) -> None:
    state: dict[str, object] = {"w": torch.zeros(1), "hook": None}

    @resilient.train(tmp_path, every=1000)
    def main(run: Run) -> None:
        run.track(state=state)
        for _ in run.steps(range(6), total=6):
            state["hook"] = (lambda: 0) if run.step in (2, 3) else None
            error = run.save().committed.exception(30)
            assert (error is not None) == (run.step in (2, 3))
            assert error is None or "hook" in str(error)

    main()
    assert [found.step for found in resilient.checkpoints(tmp_path)] == [6, 5, 4]


@pytest.mark.field_report("BR-045")
def test_an_end_that_could_not_be_saved_is_exit_code_3() -> None:
    store = Failing()
    training = Training(store, every=1000)
    with pytest.raises(SystemExit) as caught:
        training(during=failing_from(store, 0))
    assert caught.value.code == 3
    assert training.step == 12


@pytest.mark.field_report("BR-045")
def test_an_interrupt_finishes_the_save_under_way_and_says_what_is_safe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resilient")

    def during(run: Run) -> None:
        if run.step == 4:
            run.save()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Training(tmp_path, every=1000)(during=during)
    assert "stopped after step 4 by KeyboardInterrupt; the newest committed step is 4" in caplog.messages
    assert Training(tmp_path).saved() == [4]


def test_an_error_in_a_section_names_it(tmp_path: Path) -> None:
    def during(run: Run) -> None:
        with run.section("evaluation"):
            raise Stop

    with pytest.raises(Stop) as caught:
        Training(tmp_path)(during=during)
    assert caught.value.__notes__ == ["in section 'evaluation', after step 0"]


def test_settings_are_checked_at_decoration() -> None:
    for wrong in ({"every": "often"}, {"evry": 3}, {"resume": "maybe"}, {"every": 0}):
        with pytest.raises(UsageError):
            resilient.train("memory://never", **wrong)


@pytest.mark.field_report("BR-179")
@pytest.mark.parametrize(
    ("place", "options", "kind"),
    [
        ("box://bucket/run", {}, ErrorKind.MISSING_EXTRA),
        ("gs://bucket/run", {"client": "fsspec"}, ErrorKind.MISSING_EXTRA),
        ("s4://bucket/run", {}, ErrorKind.UNKNOWN_SCHEME),
    ],
)
def test_a_place_that_cannot_be_opened_here_is_told_at_decoration(
    place: str, options: dict[str, str], kind: ErrorKind
) -> None:
    with pytest.raises(UsageError) as caught:
        resilient.train(place, storage_options=options)
    assert caught.value.kind is kind


def test_arguments_and_the_result_pass_through(tmp_path: Path) -> None:
    @resilient.train(tmp_path)
    def main(run: Run, a: int, *, b: int) -> tuple[int, int, int, int]:
        return a, b, run.rank, run.world_size

    assert main(1, b=2) == (1, 2, 0, 1)


# --- several ranks ---------------------------------------------------------------------------------------------------


def train_on_ranks(place: str, total: int, every: Any, stop: int) -> tuple[int, int, list[list[int]], list[float], str]:
    """Train in float64 with a global batch that few sizes divide; return what this rank did."""
    import torch.distributed as dist

    @resilient.train(place, every=every)
    def main(run: Run) -> tuple[int, int, list[list[int]], list[float], str]:
        torch.manual_seed(0)
        data = torch.randn(30, 3, generator=torch.Generator().manual_seed(1)).double()
        model = torch.nn.Linear(3, 1).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sampler = ElasticSampler(30, global_batch=7, seed=3)
        run.track(model=model, optimizer=optimizer, data=sampler)
        start, seen = run.step, []
        for batch in run.steps(sampler, total=total):
            if run.step == stop:
                run.save().wait(60)
                dist.barrier()
                raise Stop
            seen.append(batch if run.loss_weight else [])
            optimizer.zero_grad()
            (model(data[batch]).square().mean() * run.loss_weight / run.world_size).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()
        weights = model.weight.flatten().tolist()
        return start, run.step, seen, weights, str(run.world_size)

    try:
        return main()
    except Stop:
        return -1, stop, [], [], ""


@pytest.mark.parametrize("every", [2, "1s"], ids=str)
def test_a_run_continues_on_another_number_of_ranks(every: Any, ranks: Any, tmp_path: Path) -> None:
    whole = ranks(2).run(train_on_ranks, str(tmp_path / "whole"), 14, every, -1)
    stopped = ranks(3).run(train_on_ranks, str(tmp_path / "run"), 14, every, 6)
    assert [found[1] for found in stopped] == [6, 6, 6]
    again = ranks(2).run(train_on_ranks, str(tmp_path / "run"), 14, every, -1)
    assert [(start, step) for start, step, *_ in again] == [(6, 14)] * 2
    together = [sorted(a + b) for a, b in zip(*(found[2] for found in again), strict=True)]
    expected = [sorted(a + b) for a, b in zip(*(found[2] for found in whole), strict=True)]
    assert together == expected[6:]
    for one, other in zip(again, whole, strict=True):
        assert one[3] == pytest.approx(other[3], abs=1e-9)
    assert resilient.checkpoints(tmp_path / "run")[0].step == 14


def test_keep_may_be_a_number_and_what_it_cannot_be_is_told_at_decoration(tmp_path: Path) -> None:
    @resilient.train(tmp_path / "run", every=1, keep=2)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        for _ in run.steps(range(6)):
            run.save().wait(30)

    main()
    assert len(resilient.checkpoints(tmp_path / "run")) == 2
    with pytest.raises(UsageError, match="keep"):
        resilient.train(tmp_path / "run", keep="all")  # type: ignore[arg-type]  # what a beginner may try


def test_copies_of_tiers_that_there_are_not_are_refused_at_decoration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no tier") as caught:
        resilient.train(tmp_path / "run", peer_copies=1)
    assert "tiers=" in str(caught.value.hint)
