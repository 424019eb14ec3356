"""The process that holds OR-Tools: reads a pickled model, solves it, writes a pickled answer.

Run as a script by `engine`. It must import nothing of optckpt: it starts without the
package, and as fast as OR-Tools allows.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from datetime import timedelta
from typing import Any, BinaryIO


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Solve one model; the request's fields are those of `engine.MipModel` plus the limits."""
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

    n_cols = len(request["cost"])
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(n_cols))
    proto.variables.lower_bounds.extend(request["lower"])
    proto.variables.upper_bounds.extend(request["upper"])
    proto.variables.integers.extend(request["integer"])
    priced = [j for j, c in enumerate(request["cost"]) if c]
    proto.objective.linear_coefficients.ids.extend(priced)
    proto.objective.linear_coefficients.values.extend(request["cost"][j] for j in priced)
    proto.linear_constraints.ids.extend(range(len(request["row_lower"])))
    proto.linear_constraints.lower_bounds.extend(request["row_lower"])
    proto.linear_constraints.upper_bounds.extend(request["row_upper"])
    proto.linear_constraint_matrix.row_ids.extend(request["row"])
    proto.linear_constraint_matrix.column_ids.extend(request["column"])
    proto.linear_constraint_matrix.coefficients.extend(request["value"])
    model = mathopt.Model.from_model_proto(proto)

    limits: dict[str, Any] = {
        "time_limit": timedelta(seconds=max(0.01, request["time_limit"])),
    }
    if any(request["integer"]):
        limits.update(absolute_gap_tolerance=request["gap"], relative_gap_tolerance=0.0)
        if request["nodes"] is not None:
            limits["node_limit"] = request["nodes"]
    extra = mathopt.ModelSolveParameters()
    if request["engine"] == "highs":
        solver = mathopt.SolverType.HIGHS
        # Sub-MIPs of RENS and RINS do not look at the clock.
        limits["highs"] = highs_pb2.HighsOptionsProto(
            bool_options={"mip_heuristic_run_rens": False, "mip_heuristic_run_rins": False},
            int_options={"random_seed": request["seed"]},
        )
    else:
        solver = mathopt.SolverType.GSCIP
        limits["random_seed"] = request["seed"]
        # On large relaxations of `stage_cuts` the time for cutting planes is better spent on nodes.
        limits["cuts"] = mathopt.Emphasis.OFF
        if request["hint"] is not None:
            values = dict(zip(model.variables(), request["hint"], strict=True))
            extra.solution_hints.append(mathopt.SolutionHint(variable_values=values))
    try:
        result = mathopt.solve(
            model, solver, params=mathopt.SolveParameters(**limits), model_params=extra
        )
    except Exception:
        if any(request["integer"]):
            raise
        # Now and then HiGHS ends a linear program with an error of its own.
        plain = mathopt.SolveParameters(time_limit=limits["time_limit"])
        result = mathopt.solve(model, mathopt.SolverType.GLOP, params=plain)
    found_values: list[float] | None = None
    primal = result.solutions[0].primal_solution if result.solutions else None
    # A linear program out of time comes back with a basis that need not satisfy its rows.
    if primal is not None and primal.feasibility_status == mathopt.SolutionStatus.FEASIBLE:
        found_values = [0.0] * n_cols
        for variable, value in primal.variable_values.items():
            found_values[variable.id] = value
    found_duals: list[float] | None = None
    if result.solutions and result.solutions[0].dual_solution is not None:
        found_duals = [0.0] * len(request["row_lower"])
        for row, value in result.solutions[0].dual_solution.dual_values.items():
            found_duals[row.id] = value
    reason = result.termination.reason
    return {
        "optimal": reason == mathopt.TerminationReason.OPTIMAL,
        "infeasible": reason == mathopt.TerminationReason.INFEASIBLE,
        "values": found_values,
        "duals": found_duals,
        "bound": result.termination.objective_bounds.dual_bound,
    }


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the source ends."""
    while True:
        try:
            request = pickle.load(source)
        except EOFError:
            return
        try:
            reply = answer(request)
        except Exception as e:
            reply = {"error": f"{type(e).__name__}: {e}"}
        pickle.dump(reply, sink)
        sink.flush()


if __name__ == "__main__":
    stream = importlib.import_module("worker_setup").begin()
    importlib.import_module("ortools.math_opt.python.mathopt")
    try:
        serve(sys.stdin.buffer, stream)
    except BrokenPipeError:
        os._exit(1)
