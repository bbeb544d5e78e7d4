"""Architectures that no one looked at while the capture was written: other families of the same libraries.

``LIBRARIES[library][name]()`` gives (model, arguments, keyword arguments), as in `gallery_models`. timm's names are a
random draw.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from gallery_further import LIBRARIES as FURTHER
from gallery_models import (
    BART,
    DECODER,
    ENCODER,
    SIGHT,
    SMALL,
    T5,
    TIMM,
    Case,
    images,
    old_backbone,
    seen,
    text,
    torchvision,
    video,
    vision,
)

# -- torchvision


def quantizable(name: str, size: int = 64, **options: Any) -> Callable[[], Case]:
    """As it is trained before it is prepared for quantization."""

    def build() -> Case:
        torchvision()
        from torchvision.models import quantization

        return getattr(quantization, name)(weights=None, num_classes=10, **options), (images(2, size),), {}

    return build


def detection(name: str, size: int = 64, **options: Any) -> Callable[[], Case]:
    """In training, with one box in each image; images stay small."""

    def build() -> Case:
        sizes = {} if name.startswith("ssd") else {"min_size": size, "max_size": 2 * size}
        model = torchvision().models.get_model(
            name, weights=None, weights_backbone=None, num_classes=5, **sizes, **options
        )
        box = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
        return model, (list(images(2, size)), [dict(box), dict(box)]), {}

    return build


TORCHVISION: dict[str, Callable[[], Case]] = {
    "deeplabv3_mobilenet_v3_large": old_backbone("deeplabv3_mobilenet_v3_large", aux_loss=True),
    "mvit_v1_b": video("mvit_v1_b", frames=16, size=224),
    "raft_large": lambda: (
        torchvision().models.get_model("raft_large", weights=None),
        (images(1, 128), images(1, 128)),
        {"num_flow_updates": 3},
    ),
    "resnet18 quantizable": quantizable("resnet18"),
    "mobilenet_v3_large quantizable": quantizable("mobilenet_v3_large"),
    "shufflenet_v2_x0_5 quantizable": quantizable("shufflenet_v2_x0_5"),
    "regnet_x_400mf": vision("regnet_x_400mf"),
    "mnasnet1_3": vision("mnasnet1_3", batch=2),
    "densenet169": vision("densenet169", batch=2),
    "retinanet_resnet50_fpn": detection("retinanet_resnet50_fpn"),
    "fasterrcnn_mobilenet_v3_large_320_fpn": detection("fasterrcnn_mobilenet_v3_large_320_fpn"),
}

# -- timm

SEED, DRAWN, PARAMETERS = 2026, 25, 40e6


def _timm_names() -> list[str]:
    """A draw from all that have at most `PARAMETERS` and are not in the gallery."""
    torchvision()
    import timm

    names = timm.list_models()
    random.Random(SEED).shuffle(names)
    found: list[str] = []
    for name in names:
        if len(found) == DRAWN:
            break
        with torch.device("meta"):
            try:
                count = sum(p.numel() for p in timm.create_model(name, num_classes=10).parameters())
            except Exception:  # some cannot be made without memory
                continue
        if count <= PARAMETERS and name not in TIMM:
            found.append(name)
    return found


def _drawn(name: str) -> Callable[[], Case]:
    """At 96 pixels where it takes those, else at its own size."""

    def build() -> Case:
        torchvision()
        import timm

        for size in (96, 128, None):
            model = None
            options: dict[str, Any] = {}
            try:
                if (
                    size is not None
                    and timm.get_pretrained_cfg(name) is not None
                    and timm.get_pretrained_cfg(name).fixed_input_size
                ):
                    options["img_size"] = size
                model = timm.create_model(name, num_classes=10, **options)
                use = size or model.pretrained_cfg["input_size"][-1]
                with torch.no_grad():
                    model.eval()(images(1, use))
            except Exception:  # a size that it does not take
                if size is None:
                    raise
                continue
            model.train()
            return model, (images(2 if size else 1, use),), {}
        raise AssertionError("unreachable")

    return build


# -- transformers


def made(build: Callable[[Any], Case]) -> Callable[[], Case]:
    """`build` of the package itself."""

    def call() -> Case:
        torchvision()
        import transformers as t

        return build(t)

    return call


def _tokens(length: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randint(5, 90, (batch, length))


NO_HEAD_DIM = {k: v for k, v in DECODER.items() if k != "head_dim"}
TINY_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "out_features": ["stage4"],
               "layer_type": "basic"}  # fmt: skip


def _detr(t: Any, config: str, head: str, **options: Any) -> Case:
    made = getattr(t, config)(
        backbone_config=t.ResNetConfig(**TINY_RESNET), use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=8, **options,
    )  # fmt: skip
    return getattr(t, head)(made), (), {"pixel_values": images(2, 64)}


def _mask2former(t: Any) -> Case:
    backbone = t.SwinConfig(image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2], window_size=4,
                            out_features=["stage1", "stage2", "stage3", "stage4"])  # fmt: skip
    config = t.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64,
        encoder_layers=2, decoder_layers=3, num_attention_heads=4, dim_feedforward=64, num_queries=8,
    )  # fmt: skip
    return t.Mask2FormerModel(config), (), {"pixel_values": images(1, 64)}


def _blip(t: Any) -> Case:
    words = {
        **SMALL,
        "max_position_embeddings": 32,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "encoder_hidden_size": 64,
    }
    config = t.BlipConfig(
        text_config=words,
        vision_config={**SIGHT, "image_size": 64, "patch_size": 16},
        projection_dim=32,
        image_text_hidden_size=32,
    )
    tokens = _tokens()
    given = {"input_ids": tokens, "pixel_values": images(2, 64), "labels": tokens.clone()}
    return t.BlipForConditionalGeneration(config), (), given


def _llava(t: Any) -> Case:
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**SIGHT, image_size=64, patch_size=16),
        text_config=t.LlamaConfig(**DECODER),
        image_token_index=99,
        image_seq_length=16,
        vision_feature_select_strategy="default",
    )
    tokens = torch.cat((torch.full((2, 16), 99), _tokens()), 1)
    return (
        t.LlavaForConditionalGeneration(config),
        (),
        {"input_ids": tokens, "pixel_values": images(2, 64), "labels": tokens.clone()},
    )


def _siglip(t: Any) -> Case:
    config = t.SiglipConfig(
        text_config={**SMALL, "max_position_embeddings": 16, "projection_size": 64},
        vision_config={**SIGHT, "image_size": 64, "patch_size": 16},
    )
    return t.SiglipModel(config), (), {"input_ids": _tokens(), "pixel_values": images(2, 64), "return_loss": True}


def _speech(config: str, head: str, **options: Any) -> Callable[[], Case]:
    def build(t: Any) -> Case:
        made = getattr(t, config)(
            **{**SMALL, "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 2), "conv_kernel": (10, 3, 2), "layerdrop": 0.0,
               "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, **options}
        )  # fmt: skip
        return getattr(t, head)(made), (), {"input_values": torch.randn(2, 4000)}

    return made(build)


def _vision_text(t: Any) -> Case:
    config = t.ViltConfig(**SMALL, image_size=64, patch_size=16, max_position_embeddings=32, num_labels=3)
    return (
        t.ViltForQuestionAnswering(config),
        (),
        {"input_ids": _tokens(), "pixel_values": images(2, 64), "pixel_mask": torch.ones(2, 64, 64, dtype=torch.long)},
    )


def _decision(t: Any) -> Case:
    config = t.DecisionTransformerConfig(state_dim=5, act_dim=3, hidden_size=64, n_layer=3, n_head=4, max_ep_len=64)
    steps = 8
    given = {
        "states": torch.randn(2, steps, 5), "actions": torch.randn(2, steps, 3), "rewards": torch.randn(2, steps, 1),
        "returns_to_go": torch.randn(2, steps, 1), "timesteps": torch.arange(steps).repeat(2, 1),
        "attention_mask": torch.ones(2, steps),
    }  # fmt: skip
    return t.DecisionTransformerModel(config), (), given


def _patchtst(t: Any) -> Case:
    config = t.PatchTSTConfig(num_input_channels=2, context_length=64, patch_length=8, patch_stride=8, prediction_length=8,
                              d_model=32, num_attention_heads=4, num_hidden_layers=3, ffn_dim=64)  # fmt: skip
    return (
        t.PatchTSTForPrediction(config),
        (),
        {"past_values": torch.randn(2, 64, 2), "future_values": torch.randn(2, 8, 2)},
    )


def _time_series(t: Any, config: str, head: str, **options: Any) -> Case:
    made = getattr(t, config)(prediction_length=8, context_length=16, lags_sequence=[1, 2, 3], num_time_features=1, d_model=32,
                              encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_layerdrop=0.0, decoder_layerdrop=0.0, **options)  # fmt: skip
    given = {
        "past_values": torch.randn(2, 19), "past_time_features": torch.randn(2, 19, 1), "past_observed_mask": torch.ones(2, 19),
        "future_values": torch.randn(2, 8), "future_time_features": torch.randn(2, 8, 1),
    }  # fmt: skip
    return getattr(t, head)(made), (), given


def _perceiver(t: Any) -> Case:
    config = t.PerceiverConfig(num_latents=16, d_latents=64, d_model=64, num_blocks=1, num_self_attends_per_block=4,
                               num_self_attention_heads=4, num_cross_attention_heads=4, vocab_size=100,
                               max_position_embeddings=32, qk_channels=64, v_channels=64)  # fmt: skip
    return t.PerceiverForMaskedLM(config), (), {"inputs": _tokens(32)}


def _sam(t: Any) -> Case:
    config = t.SamConfig(
        vision_config={**SIGHT, "image_size": 64, "patch_size": 16, "output_channels": 256, "window_size": 2, "global_attn_indexes": [1],
                       "mlp_dim": 128},
        prompt_encoder_config={"image_size": 64, "patch_size": 16},
    )  # fmt: skip
    return t.SamModel(config), (), {"pixel_values": images(1, 64), "input_points": torch.rand(1, 1, 2, 2) * 64}


def _layoutlmv3(t: Any) -> Case:
    config = t.LayoutLMv3Config(**ENCODER, input_size=64, patch_size=16, coordinate_size=10, shape_size=12, has_spatial_attention_bias=True,
                                has_relative_attention_bias=True, max_2d_position_embeddings=64, num_labels=3)  # fmt: skip
    boxes = torch.randint(0, 30, (2, 16, 2)).repeat(1, 1, 2) + torch.tensor([0, 0, 10, 10])
    given = {
        "input_ids": _tokens(),
        "bbox": boxes,
        "pixel_values": images(2, 64),
        "labels": torch.randint(0, 3, (2, 16)),
    }
    return t.LayoutLMv3ForTokenClassification(config), (), given


TRANSFORMERS: dict[str, Callable[[], Case]] = {
    # text, decoders
    "olmoe": text("OlmoeConfig", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, **NO_HEAD_DIM),
    "qwen3_moe": text("Qwen3MoeConfig", "Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **DECODER),
    "gpt_oss": text("GptOssConfig", "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, **DECODER),
    "deepseek_v3": text("DeepseekV3Config", "DeepseekV3ForCausalLM", n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
                        moe_intermediate_size=32, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
                        first_k_dense_replace=1, **{k: v for k, v in NO_HEAD_DIM.items() if k != "num_key_value_heads"}),
    "falcon_mamba": text("FalconMambaConfig", "FalconMambaForCausalLM", vocab_size=100, hidden_size=32, num_hidden_layers=3, length=16),
    "jamba": text("JambaConfig", "JambaForCausalLM", num_experts=2, num_experts_per_tok=1, mamba_d_state=8, use_cache=False,
                  **NO_HEAD_DIM),
    "recurrent_gemma": text("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", lru_width=64, attention_window_size=16,
                            **{k: v for k, v in NO_HEAD_DIM.items() if k != "max_position_embeddings"}),
    "lfm2": text("Lfm2Config", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"] * 2, **NO_HEAD_DIM),
    "starcoder2": text("Starcoder2Config", "Starcoder2ForCausalLM", **NO_HEAD_DIM),
    "glm4": text("Glm4Config", "Glm4ForCausalLM", **DECODER),
    "olmo3": text("Olmo3Config", "Olmo3ForCausalLM", sliding_window=16, **NO_HEAD_DIM),
    "diffllama": text("DiffLlamaConfig", "DiffLlamaForCausalLM", **DECODER),
    "mpt": text("MptConfig", "MptForCausalLM", vocab_size=100, d_model=64, n_heads=4, n_layers=4, max_seq_len=64),
    "codegen": text("CodeGenConfig", "CodeGenForCausalLM", rotary_dim=8, vocab_size=100, n_embd=64, n_layer=4, n_head=4, n_positions=64),
    "ctrl": text("CTRLConfig", "CTRLLMHeadModel", vocab_size=100, n_embd=64, dff=128, n_layer=3, n_head=4, n_positions=64),
    "xglm": text("XGLMConfig", "XGLMForCausalLM", vocab_size=100, d_model=64, ffn_dim=128, num_layers=3, attention_heads=4,
                 max_position_embeddings=64, layerdrop=0.0),
    "biogpt": text("BioGptConfig", "BioGptForCausalLM", layerdrop=0.0, **ENCODER),
    # text, encoders
    "xlm": text("XLMConfig", "XLMWithLMHeadModel", vocab_size=100, emb_dim=64, n_layers=3, n_heads=4, max_position_embeddings=64,
                bos_index=0, eos_index=1, pad_index=2),
    "roformer": text("RoFormerConfig", "RoFormerForMaskedLM", embedding_size=64, **ENCODER),
    "mobilebert": text("MobileBertConfig", "MobileBertForMaskedLM", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32,
                       **ENCODER),
    "ibert": text("IBertConfig", "IBertForMaskedLM", **ENCODER),
    "rembert": text("RemBertConfig", "RemBertForMaskedLM", input_embedding_size=32, output_embedding_size=32, **ENCODER),
    "esm": text("EsmConfig", "EsmForMaskedLM", mask_token_id=4, **ENCODER),
    "canine": text("CanineConfig", "CanineForSequenceClassification", labels="classes", length=64, downsampling_rate=4, local_transformer_stride=16,
                   num_hash_buckets=64, **{k: v for k, v in ENCODER.items() if k not in ("vocab_size",)}),
    "big_bird block_sparse": text("BigBirdConfig", "BigBirdForMaskedLM", attention_type="block_sparse", block_size=8, num_random_blocks=1,
                                   length=128, **{**ENCODER, "max_position_embeddings": 128}),
    "reformer": text("ReformerConfig", "ReformerModelWithLMHead", vocab_size=100, hidden_size=64, num_attention_heads=4,
                     attention_head_size=16, feed_forward_size=128, attn_layers=["local", "lsh"], axial_pos_shape=[4, 8],
                     axial_pos_embds_dim=[32, 32], local_attn_chunk_length=8, lsh_attn_chunk_length=8, num_buckets=4, is_decoder=True),
    # text, encoder and decoder
    "longt5": text("LongT5Config", "LongT5ForConditionalGeneration", local_radius=7, global_block_size=4, **T5),
    "umt5": text("UMT5Config", "UMT5ForConditionalGeneration", **T5),
    "switch_transformers": text("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", num_experts=4,
                                num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_decoder_layers=3, **T5),
    "m2m_100 layerdrop": text("M2M100Config", "M2M100ForConditionalGeneration", encoder_layerdrop=0.2, decoder_layerdrop=0.2, **BART),
    "blenderbot": text("BlenderbotConfig", "BlenderbotForConditionalGeneration", **BART),
    "prophetnet": text("ProphetNetConfig", "ProphetNetForConditionalGeneration", vocab_size=100, hidden_size=64, encoder_ffn_dim=128,
                       num_encoder_layers=2, num_encoder_attention_heads=4, decoder_ffn_dim=128, num_decoder_layers=2,
                       num_decoder_attention_heads=4, max_position_embeddings=64, num_buckets=8, relative_max_distance=16),
    "pegasus_x": text("PegasusXConfig", "PegasusXForConditionalGeneration", block_size=8, num_global_tokens=4, **BART),
    # images
    "detr": made(lambda t: _detr(t, "DetrConfig", "DetrForObjectDetection")),
    "conditional_detr": made(lambda t: _detr(t, "ConditionalDetrConfig", "ConditionalDetrForObjectDetection")),
    "mask2former": made(_mask2former),
    "yolos": seen("YolosConfig", "YolosForObjectDetection", image_size=[64, 64], num_detection_tokens=8, **SIGHT),
    "cvt": seen("CvtConfig", "CvtForImageClassification", embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    "focalnet": seen("FocalNetConfig", "FocalNetForImageClassification", image_size=64, embed_dim=24, depths=[2, 2], focal_levels=[2, 2],
                     focal_windows=[3, 3]),
    "hiera": seen("HieraConfig", "HieraForImageClassification", image_size=[64, 64], embed_dim=24, depths=[1, 2, 1], num_heads=[1, 2, 4],
                  query_stride=[2, 2], num_query_pool=2, masked_unit_size=[8, 8]),
    "mobilenet_v2": seen("MobileNetV2Config", "MobileNetV2ForImageClassification", image_size=64),
    "mobilevitv2": seen("MobileViTV2Config", "MobileViTV2ForImageClassification", image_size=64, width_multiplier=0.5),
    "bit": seen("BitConfig", "BitForImageClassification", embedding_size=32, hidden_sizes=[32, 64, 64, 64], depths=[1, 2, 1, 1], num_groups=4),
    "swiftformer": seen("SwiftFormerConfig", "SwiftFormerForImageClassification", embed_dims=[16, 24, 32, 48], depths=[1, 1, 2, 1]),
    "timesformer": made(lambda t: (t.TimesformerForVideoClassification(t.TimesformerConfig(image_size=64, num_frames=4, **SIGHT)), (),
                                   {"pixel_values": torch.randn(1, 4, 3, 64, 64)})),
    "vivit": made(lambda t: (t.VivitForVideoClassification(t.VivitConfig(image_size=64, num_frames=4, tubelet_size=[2, 16, 16], **SIGHT)), (),
                             {"pixel_values": torch.randn(1, 4, 3, 64, 64)})),
    "swin2sr": seen("Swin2SRConfig", "Swin2SRForImageSuperResolution", size=32, image_size=32, embed_dim=24, depths=[2, 2], num_heads=[2, 2],
                    window_size=4, upscale=2),
    "sam": made(_sam),
    # sound
    "wav2vec2 layerdrop": _speech("Wav2Vec2Config", "Wav2Vec2Model", layerdrop=0.2),
    "wav2vec2 masking": _speech("Wav2Vec2Config", "Wav2Vec2Model", mask_time_prob=0.3, mask_time_length=2),
    "sew": _speech("SEWConfig", "SEWModel", squeeze_factor=2),
    "unispeech_sat": _speech("UniSpeechSatConfig", "UniSpeechSatModel"),
    "ast": made(lambda t: (t.ASTForAudioClassification(t.ASTConfig(max_length=64, num_mel_bins=32, **SIGHT)), (),
                           {"input_values": torch.randn(2, 64, 32)})),
    "speech_to_text": made(lambda t: (t.Speech2TextForConditionalGeneration(t.Speech2TextConfig(
        **{k: v for k, v in BART.items() if k != "max_position_embeddings"}, input_feat_per_channel=20, conv_channels=32,
        max_source_positions=64, max_target_positions=32)), (),
        {"input_features": torch.randn(2, 64, 20), "labels": _tokens()})),
    # several kinds at once, and others
    "blip": made(_blip),
    "llava": made(_llava),
    "siglip": made(_siglip),
    "vilt": made(_vision_text),
    "layoutlmv3": made(_layoutlmv3),
    "decision_transformer": made(_decision),
    "patchtst": made(_patchtst),
    "time_series_transformer": made(lambda t: _time_series(t, "TimeSeriesTransformerConfig", "TimeSeriesTransformerForPrediction")),
    "autoformer": made(lambda t: _time_series(t, "AutoformerConfig", "AutoformerForPrediction", moving_average=3)),
    "informer": made(lambda t: _time_series(t, "InformerConfig", "InformerForPrediction")),
    "perceiver": made(_perceiver),
}  # fmt: skip


class _Drawn(dict[str, Callable[[], Case]]):
    """timm's names, drawn when they are first asked for."""

    def _draw(self) -> None:
        if not len(self):
            self.update({name: _drawn(name) for name in _timm_names()})

    def items(self) -> Any:
        self._draw()
        return super().items()

    def __iter__(self) -> Any:
        self._draw()
        return super().__iter__()

    def __missing__(self, name: str) -> Callable[[], Case]:
        return _drawn(name)


LIBRARIES = {"torchvision": TORCHVISION, "timm": _Drawn(), "transformers": TRANSFORMERS, **FURTHER}
