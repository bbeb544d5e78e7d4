"""Tests that say what rotoff does not do yet, and why. Each must fail: one that passes is to be taken out."""

from __future__ import annotations

KNOWN_FAULTS = {
    "runtime/test_composition.py::test_an_orthogonal_weight[bytes]": (
        "what the backward of torch.matrix_exp takes depends on its gradient's numbers, and more than a sample's showed"
    ),
    "tools/test_pipeline.py::test_unequal_ranks_keep_their_limits_and_the_gradients[split]": (
        "no plan moves what collectives have given: tensor parallel stages need 0.8 of the plain bytes, not 0.5"
    ),
    "model/test_distributed.py::test_processes_with_unequal_batches_do_the_same_under_every_limit[rest]": (
        "the smallest limit of seven of fourteen small models is that of keeping everything, so they have no plan"
    ),
    **{
        "runtime/test_changing_models.py::test_parameters_of_modules_within_other_code_may_move"
        f"[a Function over a module: adjoint, function, norm-{updates}]": (
            "what a Function saves of a parameter that moves is not what its module reads in the backward, so autograd"
            " has no gradient for it"
        )
        for updates in ("after", "during")
    },
}
