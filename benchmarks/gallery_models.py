"""The models of the gallery, by library: small configurations with random weights, nothing fetched.

``LIBRARIES[library][name]()`` gives (model, arguments, keyword arguments).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision_operators
from torch import nn

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def torchvision() -> Any:
    """The package, also where it was built for another torch."""
    torchvision_operators.declare()
    import torchvision as package

    return package


def images(batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


# -- torchvision


def vision(name: str, size: int = 64, batch: int = 4, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        models = torchvision().models
        return models.get_model(name, weights=None, num_classes=10, **options), (images(batch, size),), {}

    return build


def segmentation(name: str, size: int = 64, batch: int = 2, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        models = torchvision().models
        model = models.get_model(name, weights=None, num_classes=5, **options)
        return model, (images(batch, size),), {}

    return build


def video(name: str, frames: int = 8, size: int = 64, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        model = torchvision().models.get_model(name, weights=None, num_classes=10, **options)
        return model, (torch.randn(1, 3, frames, size, size),), {}

    return build


def old_backbone(name: str, **options: Any) -> Callable[[], Case]:
    return segmentation(name, weights_backbone=None, **options)


TORCHVISION: dict[str, Callable[[], Case]] = {
    "alexnet": vision("alexnet"),
    "vgg11_bn": vision("vgg11_bn"),
    "vgg16": vision("vgg16", batch=2),
    "resnet18": vision("resnet18"),
    "resnet50": vision("resnet50"),
    "wide_resnet50_2": vision("wide_resnet50_2", batch=2),
    "resnext50_32x4d": vision("resnext50_32x4d", batch=2),
    "densenet121": vision("densenet121"),
    "squeezenet1_1": vision("squeezenet1_1"),
    "mobilenet_v2": vision("mobilenet_v2"),
    "mobilenet_v3_small": vision("mobilenet_v3_small"),
    "mobilenet_v3_large": vision("mobilenet_v3_large"),
    "mnasnet0_5": vision("mnasnet0_5"),
    "shufflenet_v2_x1_0": vision("shufflenet_v2_x1_0"),
    "googlenet": vision("googlenet", init_weights=False, aux_logits=True, size=224, batch=2),
    "inception_v3": vision("inception_v3", init_weights=False, size=299, batch=2),
    "efficientnet_b0": vision("efficientnet_b0"),
    "efficientnet_v2_s": vision("efficientnet_v2_s", batch=2),
    "regnet_y_400mf": vision("regnet_y_400mf"),
    "convnext_tiny": vision("convnext_tiny", batch=2),
    "vit_b_16": vision("vit_b_16", image_size=64, batch=2),
    "swin_t": vision("swin_t", batch=2),
    "swin_v2_t": vision("swin_v2_t", batch=2),
    "maxvit_t": vision("maxvit_t", size=224, batch=1),
    "fcn_resnet50": old_backbone("fcn_resnet50", aux_loss=True),
    "deeplabv3_resnet50": old_backbone("deeplabv3_resnet50"),
    "lraspp_mobilenet_v3_large": old_backbone("lraspp_mobilenet_v3_large"),
    "r3d_18": video("r3d_18"),
    "mc3_18": video("mc3_18"),
    "r2plus1d_18": video("r2plus1d_18"),
    "s3d": video("s3d", frames=16, size=224),
    "mvit_v2_s": video("mvit_v2_s", frames=16, size=224),
    "swin3d_t": video("swin3d_t"),
    "raft_small": lambda: (
        torchvision().models.get_model("raft_small", weights=None),
        (images(1, 128), images(1, 128)),
        {"num_flow_updates": 3},
    ),
}


# -- timm


def image_model(name: str, size: int = 64, batch: int = 2, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        torchvision()
        import timm

        return timm.create_model(name, num_classes=10, **options), (images(batch, size),), {}

    return build


TIMM: dict[str, Callable[[], Case]] = {
    "vit_tiny_patch16_224": image_model("vit_tiny_patch16_224", img_size=64),
    "vit_small_patch32_224, drop path": image_model(
        "vit_small_patch32_224", size=96, img_size=96, drop_path_rate=0.2, drop_rate=0.1
    ),
    "deit_tiny_distilled_patch16_224": image_model("deit_tiny_distilled_patch16_224", img_size=64),
    "deit3_small_patch16_224": image_model("deit3_small_patch16_224", img_size=64),
    "swin_tiny_patch4_window7_224": image_model("swin_tiny_patch4_window7_224", size=224, batch=1),
    "swinv2_tiny_window8_256": image_model("swinv2_tiny_window8_256", size=256, batch=1),
    "convnext_atto": image_model("convnext_atto"),
    "convnextv2_atto": image_model("convnextv2_atto"),
    "efficientnet_b0": image_model("efficientnet_b0"),
    "tf_efficientnetv2_b0": image_model("tf_efficientnetv2_b0"),
    "mixer_s32_224": image_model("mixer_s32_224", size=224),
    "gmlp_ti16_224": image_model("gmlp_ti16_224", size=224),
    "resmlp_12_224": image_model("resmlp_12_224", size=224),
    "resnet26": image_model("resnet26"),
    "resnetv2_50": image_model("resnetv2_50"),
    "seresnet50": image_model("seresnet50"),
    "regnety_002": image_model("regnety_002"),
    "densenet121": image_model("densenet121"),
    "maxvit_nano_rw_256": image_model("maxvit_nano_rw_256", size=256, batch=1),
    "coatnet_nano_rw_224": image_model("coatnet_nano_rw_224", size=224, batch=1),
    "coat_tiny": image_model("coat_tiny", size=224, batch=1),
    "levit_128s": image_model("levit_128s", size=224),
    "pvt_v2_b0": image_model("pvt_v2_b0"),
    "poolformer_s12": image_model("poolformer_s12"),
    "metaformer: caformer_s18": image_model("caformer_s18"),
    "nfnet_l0": image_model("nfnet_l0"),
    "mobilenetv3_small_100": image_model("mobilenetv3_small_100"),
    "mobilenetv4_conv_small": image_model("mobilenetv4_conv_small"),
    "res2net50_26w_4s": image_model("res2net50_26w_4s"),
    "resnest14d": image_model("resnest14d"),
    "hrnet_w18_small": image_model("hrnet_w18_small"),
    "xcit_nano_12_p16_224": image_model("xcit_nano_12_p16_224", size=224),
    "cait_xxs24_224": image_model("cait_xxs24_224", size=224, batch=1),
    "eva02_tiny_patch14_224": image_model("eva02_tiny_patch14_224", size=224, batch=1),
    "beit_base_patch16_224": image_model("beit_base_patch16_224", img_size=64),
    "twins_svt_small": image_model("twins_svt_small", size=224, batch=1),
    "crossvit_tiny_240": image_model("crossvit_tiny_240", size=240),
    "convmixer_768_32": image_model("convmixer_768_32", size=64),
    "convit_tiny": image_model("convit_tiny", size=224, batch=1),
    "edgenext_xx_small": image_model("edgenext_xx_small"),
    "efficientformer_l1": image_model("efficientformer_l1", size=224),
    "efficientvit_b0": image_model("efficientvit_b0", size=64),
    "fastvit_t8": image_model("fastvit_t8"),
    "focalnet_tiny_srf": image_model("focalnet_tiny_srf", size=64),
    "gcvit_xxtiny": image_model("gcvit_xxtiny", size=224, batch=1),
    "ghostnet_100": image_model("ghostnet_100"),
    "halonet26t": image_model("halonet26t", size=256, batch=1),
    "botnet26t_256": image_model("botnet26t_256", size=256, batch=1),
    "hardcorenas_a": image_model("hardcorenas_a"),
    "inception_v4": image_model("inception_v4", size=128),
    "xception41": image_model("xception41", size=96),
    "mobileone_s0": image_model("mobileone_s0"),
    "mobilevit_xxs": image_model("mobilevit_xxs", size=64),
    "mvitv2_tiny": image_model("mvitv2_tiny", size=224, batch=1),
    "nest_tiny": image_model("nest_tiny", size=224, batch=1),
    "pit_ti_224": image_model("pit_ti_224", size=224),
    "repvgg_a0": image_model("repvgg_a0"),
    "repvit_m1": image_model("repvit_m1"),
    "rexnet_100": image_model("rexnet_100"),
    "selecsls42b": image_model("selecsls42b"),
    "sequencer2d_s": image_model("sequencer2d_s", size=224, batch=1),
    "skresnet18": image_model("skresnet18"),
    "tiny_vit_5m_224": image_model("tiny_vit_5m_224", size=224),
    "tnt_s_patch16_224": image_model("tnt_s_legacy_patch16_224", size=224, batch=1),
    "tresnet_m": image_model("tresnet_m"),
    "vgg11": image_model("vgg11"),
    "visformer_tiny": image_model("visformer_tiny", size=224),
    "volo_d1_224": image_model("volo_d1_224", size=224, batch=1),
    "vovnet39a": image_model("vovnet39a"),
    "davit_tiny": image_model("davit_tiny", size=64),
    "dla34": image_model("dla34"),
    "dpn68": image_model("dpn68"),
    "ese_vovnet19b_dw": image_model("ese_vovnet19b_dw"),
    "cspdarknet53": image_model("cspdarknet53"),
    "inception_next_tiny": image_model("inception_next_tiny"),
    "hiera_tiny_224": image_model("hiera_tiny_224", size=224, batch=1),
    "vit_relpos_small_patch16_224": image_model("vit_relpos_small_patch16_224", size=224, batch=1),
    "swiftformer_xs": image_model("swiftformer_xs", size=224),
    "starnet_s1": image_model("starnet_s1"),
    "rdnet_tiny": image_model("rdnet_tiny"),
    "mambaout_femto": image_model("mambaout_femto"),
    "shvit_s1": image_model("shvit_s1"),
    "lambda_resnet26t": image_model("lambda_resnet26t", size=256, batch=1),
    "eca_nfnet_l0": image_model("eca_nfnet_l0"),
    "gernet_s": image_model("gernet_s"),
    "nextvit_small": image_model("nextvit_small"),
}


# -- transformers


def text(
    config: str, head: str, length: int = 32, batch: int = 2, labels: str = "tokens", **options: Any
) -> Callable[[], Case]:
    """labels: "tokens" (one for each), "classes" (one for each text), or "" for a loss outside of the model."""

    def build() -> Case:
        torchvision()
        import transformers as t

        model = getattr(t, head)(getattr(t, config)(**options))
        tokens = torch.randint(5, 90, (batch, length))
        given: dict[str, Any] = {"input_ids": tokens}
        if labels == "tokens":
            given["labels"] = tokens.clone()
        elif labels == "classes":
            given["labels"] = torch.randint(0, 2, (batch,))
        return model, (), given

    return build


def seen(
    config: str, head: str, size: int = 64, batch: int = 2, key: str = "pixel_values", **options: Any
) -> Callable[[], Case]:
    def build() -> Case:
        torchvision()
        import transformers as t

        return getattr(t, head)(getattr(t, config)(**options)), (), {key: images(batch, size)}

    return build


SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0}
ENCODER = {**SMALL, "max_position_embeddings": 64, "pad_token_id": 0}
SIGHT = {k: v for k, v in SMALL.items() if k != "vocab_size"}


def _clip() -> Case:
    torchvision()
    import transformers as t

    config = t.CLIPConfig(
        text_config={**SMALL, "max_position_embeddings": 32, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1},
        vision_config={**SIGHT, "image_size": 64, "patch_size": 16},
        projection_dim=32,
    )
    tokens = torch.randint(5, 90, (2, 16))
    tokens[:, -1] = 2
    return t.CLIPModel(config), (), {"input_ids": tokens, "pixel_values": images(2, 64), "return_loss": True}


def _whisper() -> Case:
    torchvision()
    import transformers as t

    config = t.WhisperConfig(
        vocab_size=100, d_model=64, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=50, max_target_positions=32, num_mel_bins=20,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
    )  # fmt: skip
    return (
        t.WhisperForConditionalGeneration(config),
        (),
        {
            "input_features": torch.randn(2, 20, 100),
            "labels": torch.randint(5, 90, (2, 16)),
        },
    )


def _speech(config: str, head: str, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        torchvision()
        import transformers as t

        made = getattr(t, config)(
            **{**SMALL, "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 2), "conv_kernel": (10, 3, 2), "layerdrop": 0.0,
               "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, **options}
        )  # fmt: skip
        return getattr(t, head)(made), (), {"input_values": torch.randn(2, 4000)}

    return build


T5 = {
    "vocab_size": 100,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 100, "d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
GPT = {"vocab_size": 100, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}

TRANSFORMERS: dict[str, Callable[[], Case]] = {
    "llama": text("LlamaConfig", "LlamaForCausalLM", **DECODER),
    "qwen2": text("Qwen2Config", "Qwen2ForCausalLM", **DECODER),
    "qwen3": text("Qwen3Config", "Qwen3ForCausalLM", **DECODER),
    "mistral": text("MistralConfig", "MistralForCausalLM", sliding_window=16, **DECODER),
    "gemma2": text("Gemma2Config", "Gemma2ForCausalLM", **DECODER),
    "gemma3": text("Gemma3TextConfig", "Gemma3ForCausalLM", **DECODER),
    "phi": text("PhiConfig", "PhiForCausalLM", **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    "phi3": text("Phi3Config", "Phi3ForCausalLM", **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    "gpt2": text("GPT2Config", "GPT2LMHeadModel", **GPT),
    "gpt_neo": text("GPTNeoConfig", "GPTNeoForCausalLM", vocab_size=100, hidden_size=64, num_layers=4, num_heads=4,
                    attention_types=[[["global", "local"], 2]], max_position_embeddings=64),
    "gpt_neox": text("GPTNeoXConfig", "GPTNeoXForCausalLM", **ENCODER),
    "gptj": text("GPTJConfig", "GPTJForCausalLM", rotary_dim=8, **GPT),
    "opt": text("OPTConfig", "OPTForCausalLM", vocab_size=100, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
                ffn_dim=128, max_position_embeddings=64, word_embed_proj_dim=64, pad_token_id=0),
    "bloom": text("BloomConfig", "BloomForCausalLM", vocab_size=100, hidden_size=64, n_layer=4, n_head=4),
    "falcon": text("FalconConfig", "FalconForCausalLM", vocab_size=100, hidden_size=64, num_hidden_layers=4,
                   num_attention_heads=4),
    "olmo2": text("Olmo2Config", "Olmo2ForCausalLM", **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    "stablelm": text("StableLmConfig", "StableLmForCausalLM", **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    "cohere": text("CohereConfig", "CohereForCausalLM", **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    "granite": text("GraniteConfig", "GraniteForCausalLM", **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    "mamba": text("MambaConfig", "MambaForCausalLM", vocab_size=100, hidden_size=32, num_hidden_layers=3, length=16),
    "mamba2": text("Mamba2Config", "Mamba2ForCausalLM", vocab_size=100, hidden_size=32, num_hidden_layers=3, num_heads=8,
                   head_dim=8, n_groups=1, length=16),
    "rwkv": text("RwkvConfig", "RwkvForCausalLM", vocab_size=100, hidden_size=32, num_hidden_layers=3, length=16,
                 context_length=32),
    "mixtral": text("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, **DECODER),
    "qwen2_moe": text("Qwen2MoeConfig", "Qwen2MoeForCausalLM", num_experts=4, moe_intermediate_size=64,
                      shared_expert_intermediate_size=64, **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    "bert": text("BertConfig", "BertForMaskedLM", **ENCODER),
    "bert, classes": text("BertConfig", "BertForSequenceClassification", labels="classes", **ENCODER),
    "bert, loss outside": text("BertConfig", "BertModel", labels="", **ENCODER),
    "roberta": text("RobertaConfig", "RobertaForMaskedLM", **ENCODER),
    "distilbert": text("DistilBertConfig", "DistilBertForMaskedLM", vocab_size=100, dim=64, n_layers=4, n_heads=4,
                       hidden_dim=128, max_position_embeddings=64),
    "electra": text("ElectraConfig", "ElectraForMaskedLM", embedding_size=32, **ENCODER),
    "deberta": text("DebertaConfig", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], **ENCODER),
    "deberta_v2": text("DebertaV2Config", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"],
                       position_buckets=16, **ENCODER),
    "albert": text("AlbertConfig", "AlbertForMaskedLM", embedding_size=32, **ENCODER),
    "mpnet": text("MPNetConfig", "MPNetForMaskedLM", **ENCODER),
    "modernbert": text("ModernBertConfig", "ModernBertForMaskedLM", **ENCODER, bos_token_id=1, eos_token_id=2,
                       cls_token_id=1, sep_token_id=2),
    "funnel": text("FunnelConfig", "FunnelForMaskedLM", vocab_size=100, block_sizes=[2, 2], d_model=64, n_head=4, d_head=16,
                   d_inner=128),
    "xlnet": text("XLNetConfig", "XLNetLMHeadModel", vocab_size=100, d_model=64, n_layer=3, n_head=4, d_inner=128),
    "longformer": text("LongformerConfig", "LongformerForMaskedLM", attention_window=8, **ENCODER),
    "big_bird": text("BigBirdConfig", "BigBirdForMaskedLM", attention_type="original_full", **ENCODER),
    "fnet": text("FNetConfig", "FNetForMaskedLM", **{k: v for k, v in ENCODER.items() if k != "num_attention_heads"}),
    "nystromformer": text("NystromformerConfig", "NystromformerForMaskedLM", num_landmarks=8, segment_means_seq_len=32, **ENCODER),
    "convbert": text("ConvBertConfig", "ConvBertForMaskedLM", embedding_size=32, **ENCODER),
    "squeezebert": text("SqueezeBertConfig", "SqueezeBertForMaskedLM", embedding_size=64, **ENCODER),
    "t5": text("T5Config", "T5ForConditionalGeneration", **T5),
    "mt5": text("MT5Config", "MT5ForConditionalGeneration", **T5),
    "bart": text("BartConfig", "BartForConditionalGeneration", **BART),
    "mbart": text("MBartConfig", "MBartForConditionalGeneration", **BART),
    "pegasus": text("PegasusConfig", "PegasusForConditionalGeneration", **BART),
    "marian": text("MarianConfig", "MarianMTModel", **BART),
    "led": text("LEDConfig", "LEDForConditionalGeneration", attention_window=8, max_encoder_position_embeddings=64,
                max_decoder_position_embeddings=64, **{k: v for k, v in BART.items() if k != "max_position_embeddings"}),
    "whisper": _whisper,
    "clip": _clip,
    "vit": seen("ViTConfig", "ViTForImageClassification", image_size=64, **SIGHT),
    "deit": seen("DeiTConfig", "DeiTForImageClassification", image_size=64, **SIGHT),
    "beit": seen("BeitConfig", "BeitForImageClassification", image_size=64, use_relative_position_bias=True, **SIGHT),
    "swin": seen("SwinConfig", "SwinForImageClassification", image_size=64, embed_dim=24, depths=[2, 2], num_heads=[2, 4],
                 window_size=4),
    "swinv2": seen("Swinv2Config", "Swinv2ForImageClassification", image_size=64, embed_dim=24, depths=[2, 2],
                   num_heads=[2, 4], window_size=4),
    "convnext": seen("ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[16, 32, 64, 64], depths=[2, 2, 2, 2]),
    "convnextv2": seen("ConvNextV2Config", "ConvNextV2ForImageClassification", hidden_sizes=[16, 32, 64, 64],
                       depths=[2, 2, 2, 2]),
    "dinov2": seen("Dinov2Config", "Dinov2ForImageClassification", image_size=64, patch_size=16, **SIGHT),
    "segformer": seen("SegformerConfig", "SegformerForSemanticSegmentation", hidden_sizes=[16, 32, 64, 64],
                      decoder_hidden_size=32, depths=[2, 2, 2, 2]),
    "resnet": seen("ResNetConfig", "ResNetForImageClassification", embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2]),
    "regnet": seen("RegNetConfig", "RegNetForImageClassification", embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2],
                   groups_width=16),
    "mobilevit": seen("MobileViTConfig", "MobileViTForImageClassification", image_size=64, hidden_sizes=[32, 48, 64],
                      neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 64]),
    "poolformer": seen("PoolFormerConfig", "PoolFormerForImageClassification", hidden_sizes=[16, 32, 64, 64],
                       depths=[2, 2, 2, 2]),
    "pvt_v2": seen("PvtV2Config", "PvtV2ForImageClassification", image_size=64),
    "levit": seen("LevitConfig", "LevitForImageClassification", image_size=64, hidden_sizes=[32, 48, 64],
                  num_attention_heads=[2, 3, 4], depths=[2, 2, 2], key_dim=[8, 8, 8]),
    "efficientnet": seen("EfficientNetConfig", "EfficientNetForImageClassification", image_size=64),
    "vit_mae": seen("ViTMAEConfig", "ViTMAEForPreTraining", image_size=64, decoder_hidden_size=32, decoder_num_hidden_layers=2,
                    decoder_num_attention_heads=4, decoder_intermediate_size=64, **SIGHT),
    "siglip vision": seen("SiglipVisionConfig", "SiglipVisionModel", image_size=64, patch_size=16, **SIGHT),
    "dpt": seen("DPTConfig", "DPTForDepthEstimation", image_size=64, backbone_out_indices=[0, 1, 2, 3],
                neck_hidden_sizes=[16, 32, 64, 64], fusion_hidden_size=32, readout_type="project", **SIGHT),
    "glpn": seen("GLPNConfig", "GLPNForDepthEstimation", hidden_sizes=[16, 32, 80, 64], decoder_hidden_size=32),
    "upernet-like: data2vec": seen("Data2VecVisionConfig", "Data2VecVisionForImageClassification", image_size=64, **SIGHT),
    "videomae": lambda: _videomae(),
    "wav2vec2": _speech("Wav2Vec2Config", "Wav2Vec2Model"),
    "hubert": _speech("HubertConfig", "HubertModel"),
    "wavlm": _speech("WavLMConfig", "WavLMModel"),
}  # fmt: skip


def _videomae() -> Case:
    torchvision()
    import transformers as t

    config = t.VideoMAEConfig(image_size=32, num_frames=4, **SIGHT)
    return t.VideoMAEForVideoClassification(config), (), {"pixel_values": torch.randn(2, 4, 3, 32, 32)}


# -- small ones of one's own


class UNet(nn.Module):
    """Long skip connections, from the first layer to the last."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**n for n in range(depth + 1)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self._block(i, o) for i, o in zip(sizes, sizes[1:], strict=False))
        self.up = nn.ModuleList(self._block(o + i, i) for i, o in zip(sizes, sizes[1:], strict=False))
        self.out = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _block(i: int, o: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(nn.functional.max_pool2d(x, 2))
        for block, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = block(torch.cat((nn.functional.interpolate(x, scale_factor=2.0), skip), 1))
        return self.out(x)


OWN: dict[str, Callable[[], Case]] = {"unet": lambda: (UNet(), (images(4, 64),), {})}

LIBRARIES = {"torchvision": TORCHVISION, "timm": TIMM, "transformers": TRANSFORMERS, "own": OWN}
