"""Tests that say what rotoff does not do yet, and why. Each of the first table must fail: one that passes is to be taken
out. Those of the second fail in some runs."""

from __future__ import annotations

KNOWN_FAULTS = {
    **dict.fromkeys(
        (
            f"runtime/test_changing_models.py::test_what_changes_between_steps_is_followed_or_refused[{name}]"
            for name in (
                "checkpoint with a generator's preserve, in the other modes",
                "a Function over a module: adjoint, function, norm",
                "a Function over a module: adjoint, function, norm, in the other modes",
                "a tensor of the forward handed to a Function's module: a parameter",
            )
        ),
        "the smallest limit is what keeping everything takes, so there is no plan to compare",
    ),
    **dict.fromkeys(
        (
            "runtime/test_changing_models.py::test_what_changes_between_steps_is_followed_or_refused[a dict and a list of"
            f" the caller's that the forward adds to{which}]"
            for which in ("", ", in the other modes")
        ),
        "measuring runs the forward again on a dict that the first run has emptied",
    ),
    "runtime/test_placed_sizes.py::test_smaller_batches_need_no_search[after]": (
        "under a device_limit each new size is recorded, and planned from its own record"
    ),
    **dict.fromkeys(
        (
            f"runtime/test_placed_training.py::test_the_predicted_peak_is_the_measured_one[{name}]"
            for name in ("deep-after", "tied-during")
        ),
        "predicted bytes are 6 to 18 % above the measured ones",
    ),
    "tools/test_largest.py::test_a_question_that_the_batch_does_not_decide_can_be_estimated_and_is_not_asked_again": (
        "an estimate does not follow what the model asks of values, and has few stages from there on"
    ),
}

SOMETIMES = {
    "model/test_distributed.py::test_gradients_are_those_of_the_plain_model_and_all_processes_follow_one_plan[fsdp]": (
        "half-way to keeping everything, a machine under load finds a plan in mode offload that keeps everything"
    ),
}
