"""Models of further libraries: diffusers (denoisers, decoders), peft (adapters on frozen language models) and
torch_geometric (graphs).

``LIBRARIES[library][name]()`` gives (model, arguments, keyword arguments), as in `gallery_models`; a part of the
held-out gallery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gallery_models import Case, torchvision

Build = Callable[[], Case]


def _made(package: str, build: Callable[[Any], Case]) -> Build:
    """`build` of the package of that name, which may import torchvision."""

    def call() -> Case:
        from importlib import import_module

        torchvision()
        return build(import_module(package))

    return call


def _latents(channels: int = 4, size: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def _steps() -> torch.Tensor:
    return torch.tensor([3, 7])


# -- diffusers

SIZES: dict[str, Any] = {"block_out_channels": (32, 64), "layers_per_block": 2, "norm_num_groups": 8}
CROSSED: dict[str, Any] = {
    **SIZES,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "cross_attention_dim": 32,
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4}


def _conditioned(d: Any, checkpoint: bool = False) -> Case:
    model = d.UNet2DConditionModel(
        sample_size=16, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=8, **CROSSED
    )
    if checkpoint:
        model.enable_gradient_checkpointing()
    return model, (_latents(), _steps(), torch.randn(2, 7, 32)), {}


def _unet(d: Any) -> Case:
    model = d.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    return model, (_latents(3, 32), _steps()), {}


def _decoder(d: Any) -> Case:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return d.AutoencoderKL(latent_channels=4, **blocks, **SIZES), (_latents(3, 32),), {"sample_posterior": True}


def _control(d: Any) -> Case:
    model = d.ControlNetModel(in_channels=4, conditioning_embedding_out_channels=(16, 32), **CROSSED)
    return model, (_latents(), _steps(), torch.randn(2, 7, 32), _latents(3, 32)), {}


def _dit(d: Any) -> Case:
    model = d.DiTTransformer2DModel(num_layers=6, sample_size=16, patch_size=2, num_embeds_ada_norm=10, **HEADS)
    return model, (_latents(),), {"timestep": _steps(), "class_labels": torch.tensor([1, 2])}


def _sd3(d: Any) -> Case:
    model = d.SD3Transformer2DModel(
        sample_size=16, num_layers=6, joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=64,
        out_channels=4, **HEADS,
    )  # fmt: skip
    given = {"encoder_hidden_states": torch.randn(2, 9, 32), "pooled_projections": torch.randn(2, 64)}
    return model, (), {"hidden_states": _latents(), "timestep": _steps(), **given}


def _flux(d: Any) -> Case:
    model = d.FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        **HEADS,
    )
    given = {"encoder_hidden_states": torch.randn(2, 9, 32), "pooled_projections": torch.randn(2, 32)}
    places = {"img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(9, 3)}
    return model, (), {"hidden_states": torch.randn(2, 16, 4), "timestep": torch.tensor([0.3, 0.7]), **given, **places}


def _wan(d: Any) -> Case:
    model = d.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=64,
        num_layers=6, rope_max_seq_len=32,
    )  # fmt: skip
    given = {"timestep": torch.tensor([5]), "encoder_hidden_states": torch.randn(1, 12, 16)}
    return model, (), {"hidden_states": torch.randn(1, 4, 2, 16, 16), **given}


DIFFUSERS = {
    name: _made("diffusers", build)
    for name, build in {
        "unet": _unet,
        "unet, conditioned": _conditioned,
        "unet, checkpoints of its own": lambda d: _conditioned(d, checkpoint=True),
        "autoencoder": _decoder,
        "controlnet": _control,
        "dit": _dit,
        "sd3": _sd3,
        "flux": _flux,
        "wan": _wan,
    }.items()
}

# -- peft


def _gpt2() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=100, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=1
        )
    )


def _llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def _adapted(base: Callable[[], Any], config: Callable[[Any], Any]) -> Build:
    def build(package: Any) -> Case:
        tokens = torch.randint(0, 100, (2, 32))
        return package.get_peft_model(base(), config(package)), (), {"input_ids": tokens, "labels": tokens.clone()}

    return _made("peft", build)


PEFT = {
    "lora": _adapted(
        _gpt2,
        lambda p: p.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1),
    ),
    "dora": _adapted(_llama, lambda p: p.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", use_dora=True)),
    "ia3": _adapted(
        _llama,
        lambda p: p.IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    ),
    "prefix": _adapted(_gpt2, lambda p: p.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "prompt": _adapted(_llama, lambda p: p.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
}

# -- torch_geometric


def _graph(name: str, **options: Any) -> Build:
    def build(package: Any) -> Case:
        model = getattr(package, name)(16, 64, 6, 4, **options)
        return model, (torch.randn(100, 16), torch.randint(0, 100, (2, 400))), {}

    return _made("torch_geometric.nn.models", build)


GRAPHS = {
    "gcn": _graph("GCN", dropout=0.1),
    "gat": _graph("GAT", heads=4),
    "gin": _graph("GIN"),
    "sage": _graph("GraphSAGE"),
    "pna": _graph("PNA", aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([0, 10, 50, 40])),
}

LIBRARIES: dict[str, dict[str, Build]] = {"diffusers": DIFFUSERS, "peft": PEFT, "torch_geometric": GRAPHS}
