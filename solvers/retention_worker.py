"""The process that holds CP-SAT for `retention`: reads a pickled model, answers as it goes.

Run as a script; it must import nothing of optckpt (see `engine_worker`). The request is what
`Timeline` and its `solve` read; "until" is the time.time() at which to end. Each message is a
mapping: "copies" (re-executions as (operation, stage)) of a better solution, "bound" (a better
lower bound, in the objective's units), "end" (whether the search was finished), or "error".
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

Tell = Callable[[dict[str, Any]], None]


class Timeline:
    """The retention intervals of one problem as a CP-SAT model.

    Event (j, k) of the timeline, numbered j (n + 1) + k, is the execution of operation k in stage
    j, which ends with base operation j; stage n ends with the end of the step.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        from ortools.sat.python import cp_model

        self.model = cp_model.CpModel()
        self.n: int = request["n"]
        self.width = self.n + 1
        self.end = self.n * self.width + self.n
        self.reads: list[list[int]] = request["reads"]
        self.writes: list[list[int]] = request["writes"]
        self.producer: list[int] = request["producer"]
        self.repeatable: list[bool] = request["repeatable"]
        self.extra: int = request["executions"] - 1
        model = self.model
        self.active: dict[tuple[int, int], Any] = {}
        """Whether operation o is executed for the i-th time (i >= 1)."""
        self.stage: dict[tuple[int, int], Any] = {}
        self.last: dict[tuple[int, int], Any] = {}
        """Event of the last use of the i-th copy of buffer t."""
        self.choice: dict[tuple[int, int, int, int], Any] = {}
        """Whether the j-th execution of v reads the i-th copy of t."""
        for o in range(self.n):
            for i in self.again(o):
                self.active[o, i] = model.new_bool_var("")
                self.stage[o, i] = model.new_int_var(o + 1, self.n, "")
                if i > 1:
                    model.add_implication(self.active[o, i], self.active[o, i - 1])
                    model.add(self.stage[o, i] > self.stage[o, i - 1])
        size, workspace, takes = request["size"], request["workspace"], request["takes"]
        intervals, demands = [], []
        for o in range(self.n):
            for i in range(self.copies(o)):
                start, active = self.start(o, i), self.active.get((o, i), True)
                for k, t in enumerate(self.writes[o]):
                    last = self.last[t, i] = model.new_int_var(0, self.end, "")
                    model.add(last >= start).only_enforce_if(active)
                    if (o, i + 1) in self.active:
                        model.add(last < self.start(o, i + 1)).only_enforce_if(
                            self.active[o, i + 1]
                        )
                    # What may take over an input's memory is charged from the next event on.
                    begin = start + 1 if k == 0 and takes[o] else start
                    span = model.new_int_var(0, self.end + 1, "")
                    intervals.append(
                        model.new_optional_interval_var(begin, span, last + 1, active, "")
                    )
                    demands.append(size[t])
                if workspace[o]:
                    intervals.append(
                        model.new_optional_fixed_size_interval_var(start, 1, active, "")
                    )
                    demands.append(workspace[o])
        for v in range(self.n + 1):
            for j in range(self.copies(v)):
                for t in self.reads[v]:
                    self.serve(t, v, j)
        model.add_cumulative(intervals, demands, request["budget"])
        model.minimize(sum(request["cost"][o] * a for (o, _), a in self.active.items()))
        if request["hint"] is not None:
            self.hint(request["hint"])

    def again(self, o: int) -> range:
        return range(1, 1 + self.extra) if o < self.n and self.repeatable[o] else range(0)

    def copies(self, o: int) -> int:
        return 1 + len(self.again(o))

    def start(self, o: int, i: int) -> Any:
        """The event of an execution."""
        if i == 0:
            return o * self.width + o
        return self.stage[o, i] * self.width + o

    def serve(self, t: int, v: int, j: int) -> None:
        """The j-th execution of v reads a copy of t that is in memory."""
        model, o = self.model, self.producer[t]
        read = self.start(v, j)
        active = self.active.get((v, j), True)
        choices = []
        for i in range(self.copies(o)):
            if self.copies(o) == 1:
                chosen = active
            else:
                chosen = self.choice[t, v, j, i] = model.new_bool_var("")
                choices.append(chosen)
            model.add(self.last[t, i] >= read).only_enforce_if(chosen)
            if i:
                model.add_implication(chosen, self.active[o, i])
                # Operations of a stage are executed in base order, and o stands before v.
                latest = v if j == 0 else self.stage[v, j]
                model.add(self.stage[o, i] <= latest).only_enforce_if(chosen)
        if choices:
            model.add_exactly_one(choices).only_enforce_if(active)

    def hint(self, copies: list[tuple[int, int]]) -> None:
        """Suggest the schedule with these re-executions, complete with all that follows."""
        runs = [(o * self.width + o, o) for o in range(self.n + 1)]
        runs += [(stage * self.width + o, o) for o, stage in copies]
        number = [-1] * (self.n + 1)
        last: dict[tuple[int, int], int] = {}
        chosen: set[tuple[int, int, int, int]] = set()
        stages: dict[tuple[int, int], int] = {}
        for event, o in sorted(runs):
            number[o] += 1
            stages[o, number[o]] = event // self.width
            for t in self.reads[o]:
                copy = number[self.producer[t]]
                last[t, copy] = event
                chosen.add((t, o, number[o], copy))
            if o < self.n:
                for t in self.writes[o]:
                    last[t, number[o]] = event
        for key, variable in self.active.items():
            self.model.add_hint(variable, key in stages)
        for key, variable in self.stage.items():
            if key in stages:
                self.model.add_hint(variable, stages[key])
        for key, variable in self.last.items():
            if key in last:
                self.model.add_hint(variable, last[key])
        for choice, variable in self.choice.items():
            self.model.add_hint(variable, choice in chosen)

    def solve(self, request: dict[str, Any], tell: Tell) -> None:
        from ortools.sat.python import cp_model

        timeline = self

        class Report(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
            def on_solution_callback(self) -> None:
                tell(
                    {
                        "copies": [
                            (o, self.value(timeline.stage[o, i]))
                            for (o, i), a in timeline.active.items()
                            if self.boolean_value(a)
                        ]
                    }
                )

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, request["until"] - time.time())
        solver.parameters.num_workers = request["threads"]
        solver.parameters.random_seed = request["seed"]
        solver.parameters.absolute_gap_limit = request["gap"]
        solver.best_bound_callback = lambda bound: tell({"bound": bound})
        status = solver.solve(self.model, Report())
        if status == cp_model.MODEL_INVALID:
            raise ValueError(self.model.validate())
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
            tell({"bound": solver.best_objective_bound})
        tell({"end": status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)})


if __name__ == "__main__":
    stream = importlib.import_module("worker_setup").begin()

    def tell(message: dict[str, Any]) -> None:
        pickle.dump(message, stream)
        stream.flush()

    try:
        try:
            asked = pickle.load(sys.stdin.buffer)
            Timeline(asked).solve(asked, tell)
        except Exception as e:
            tell({"error": f"{type(e).__name__}: {e}"})
    except BrokenPipeError:
        os._exit(1)
