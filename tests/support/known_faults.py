"""Tests that say what rotoff does not do yet, and why. Each of the first table must fail: one that passes is to be taken
out. Those of the second fail in some runs."""

from __future__ import annotations

KNOWN_FAULTS = {
    "model/test_integrations.py::test_trainer_is_charged_for_what_it_holds_alone[0.0]": (
        "within the Trainer a step allocates 0.1 to 0.3 % more than predicted"
    ),
    "profile/test_predicted_bytes.py::test_casts_of_inner_autocast_are_charged[False]": (
        "predicted bytes are 13 % above the measured ones where autocast regions are closed within the forward"
    ),
    "planning/test_random_courses.py::test_courses_that_take_turns_come_to_have_one_plan": (
        "few stages: the smallest limit is what keeping everything takes"
    ),
    "profile/test_forms.py::test_order_checker_notices_missing_wait_for_form": (
        "the checker of the tests' link does not see what the tape's slots read"
    ),
    "runtime/test_held_elsewhere.py::test_a_graph_that_waits_is_none_the_worse_for_a_measurement": (
        "a graph that waits while another forward changes a buffer that it reads again is refused"
    ),
    **dict.fromkeys(
        (
            f"runtime/test_changing_models.py::test_what_changes_between_steps_is_followed_or_refused[{name}]"
            for name in (
                "checkpoint with a generator's preserve",
                "a Function over a module: adjoint, function, norm",
                "a tensor of the forward handed to a Function's module: a parameter",
            )
        ),
        "the smallest limit is what keeping everything takes, so there is no plan to compare",
    ),
    "runtime/test_check.py::test_a_step_beyond_the_limit_off_course_is_said_once": (
        "a step off its course does not say by how much it exceeds the limit"
    ),
    "tools/test_doctor.py::test_copies_that_are_less_hidden_than_predicted": (
        "after a step at another size the recording of times waits for a course that is not the next one"
    ),
    "tools/test_largest.py::test_a_question_that_the_batch_does_not_decide_can_be_estimated_and_is_not_asked_again": (
        "an estimate does not follow what the model asks of values, and has few stages from there on"
    ),
}

SOMETIMES = {
    "runtime/test_placed_training.py::test_the_predicted_peak_is_the_measured_one[shared-during]": (
        "a gradient that stays counts in the whole backward of the stage that makes it, which may be the largest"
        " operation: 6 % too much"
    ),
    "model/test_distributed.py::test_gradients_are_those_of_the_plain_model_and_all_processes_follow_one_plan[fsdp]": (
        "half-way to keeping everything, a machine under load finds a plan in mode offload that keeps everything"
    ),
}
