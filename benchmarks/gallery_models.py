"""The models of the gallery, by library: small configurations with random weights, nothing fetched.

``LIBRARIES[library][name]()`` gives (model, arguments, keyword arguments). ``HELD_OUT`` has architectures that no one
looked at while the capture was written: other families of the same libraries (timm's are a random draw).

Rows with the same options are one row: ``"gpt_neox:GPTNeoX opt:OPT"`` are names with the beginnings of their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
import torchvision_operators
from torch import nn

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Build = Callable[[], Case]
Row = dict[str, Build]


def of(package: str, build: Callable[[Any], Case]) -> Build:
    """`build` of the package of that name, which may import torchvision, built for another torch or not."""

    def call() -> Case:
        torchvision_operators.declare()
        return build(import_module(package))

    return call


def images(batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def tokens(length: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randint(5, 90, (batch, length))


# -- torchvision


def of_torchvision(names: str, given: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], **options: Any) -> Row:
    def build(name: str) -> Build:
        return of("torchvision.models", lambda v: (v.get_model(name, weights=None, **options), *given()))

    return {name: build(name) for name in names.split()}


def vision(names: str, size: int = 64, batch: int = 4, classes: int = 10, **options: Any) -> Row:
    return of_torchvision(names, lambda: ((images(batch, size),), {}), num_classes=classes, **options)


def segmentation(names: str, **options: Any) -> Row:
    return vision(names, batch=2, classes=5, weights_backbone=None, **options)


def video(names: str, frames: int = 8, size: int = 64) -> Row:
    return of_torchvision(names, lambda: ((torch.randn(1, 3, frames, size, size),), {}), num_classes=10)


def flow(name: str) -> Row:
    return of_torchvision(name, lambda: ((images(1, 128), images(1, 128)), {"num_flow_updates": 3}))


def detection(names: str) -> Row:
    """In training, with one box in each image; images stay small."""

    def given() -> tuple[tuple[Any, ...], dict[str, Any]]:
        boxes = [{"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])} for _ in range(2)]
        return (list(images(2, 64)), boxes), {}

    return of_torchvision(names, given, weights_backbone=None, min_size=64, max_size=128, num_classes=5)


TORCHVISION: Row = {
    **vision("alexnet vgg11_bn resnet18 resnet50 densenet121 squeezenet1_1 mobilenet_v2 mobilenet_v3_small"
             " mobilenet_v3_large mnasnet0_5 shufflenet_v2_x1_0 efficientnet_b0 regnet_y_400mf"),
    **vision("vgg16 wide_resnet50_2 resnext50_32x4d efficientnet_v2_s convnext_tiny swin_t swin_v2_t", batch=2),
    **vision("vit_b_16", image_size=64, batch=2),
    **vision("maxvit_t", size=224, batch=1),
    **vision("googlenet", init_weights=False, aux_logits=True, size=224, batch=2),
    **vision("inception_v3", init_weights=False, size=299, batch=2),
    **segmentation("fcn_resnet50", aux_loss=True),
    **segmentation("deeplabv3_resnet50 lraspp_mobilenet_v3_large"),
    **video("r3d_18 mc3_18 r2plus1d_18 swin3d_t"),
    **video("s3d mvit_v2_s", frames=16, size=224),
    **flow("raft_small"),
}  # fmt: skip

HELD_OUT_TORCHVISION: Row = {
    **segmentation("deeplabv3_mobilenet_v3_large", aux_loss=True),
    **video("mvit_v1_b", frames=16, size=224),
    **flow("raft_large"),
    **vision("regnet_x_400mf"),
    # as they are trained before they are prepared for quantization
    **vision("quantized_resnet18 quantized_mobilenet_v3_large quantized_shufflenet_v2_x0_5", batch=2),
    **vision("mnasnet1_3 densenet169", batch=2),
    **detection("retinanet_resnet50_fpn fasterrcnn_mobilenet_v3_large_320_fpn"),
}

# -- timm


def timm_model(name: str, size: int = 64, batch: int = 2, **options: Any) -> Build:
    return of("timm", lambda t: (t.create_model(name, num_classes=10, **options), (images(batch, size),), {}))


def timm_models(names: str, **options: Any) -> Row:
    return {name: timm_model(name, **options) for name in names.split()}


TIMM: Row = {
    **timm_models("convnext_atto convnextv2_atto efficientnet_b0 tf_efficientnetv2_b0 resnet26 resnetv2_50 seresnet50"
                  " regnety_002 densenet121 pvt_v2_b0 poolformer_s12 nfnet_l0 mobilenetv3_small_100 res2net50_26w_4s"
                  " mobilenetv4_conv_small resnest14d hrnet_w18_small convmixer_768_32 edgenext_xx_small fastvit_t8"
                  " efficientvit_b0 focalnet_tiny_srf ghostnet_100 hardcorenas_a mobileone_s0 mobilevit_xxs repvgg_a0"
                  " repvit_m1 rexnet_100 selecsls42b skresnet18 tresnet_m vgg11 vovnet39a davit_tiny dla34 dpn68"
                  " ese_vovnet19b_dw cspdarknet53 inception_next_tiny starnet_s1 rdnet_tiny mambaout_femto shvit_s1"
                  " eca_nfnet_l0 gernet_s nextvit_small"),
    **timm_models("mixer_s32_224 gmlp_ti16_224 resmlp_12_224 levit_128s xcit_nano_12_p16_224 efficientformer_l1"
                  " pit_ti_224 tiny_vit_5m_224 visformer_tiny swiftformer_xs", size=224),
    **timm_models("swin_tiny_patch4_window7_224 coatnet_nano_rw_224 coat_tiny cait_xxs24_224 eva02_tiny_patch14_224"
                  " twins_svt_small convit_tiny gcvit_xxtiny mvitv2_tiny nest_tiny sequencer2d_s volo_d1_224"
                  " hiera_tiny_224 vit_relpos_small_patch16_224", size=224, batch=1),
    **timm_models("swinv2_tiny_window8_256 maxvit_nano_rw_256 halonet26t botnet26t_256 lambda_resnet26t",
                  size=256, batch=1),
    **timm_models("vit_tiny_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224"
                  " beit_base_patch16_224", img_size=64),
    **timm_models("crossvit_tiny_240", size=240),
    **timm_models("inception_v4", size=128),
    **timm_models("xception41", size=96),
    "metaformer: caformer_s18": timm_model("caformer_s18"),
    "tnt_s_patch16_224": timm_model("tnt_s_legacy_patch16_224", size=224, batch=1),
    "vit_small_patch32_224, drop path": timm_model("vit_small_patch32_224", size=96, img_size=96, drop_path_rate=0.2,
                                                   drop_rate=0.1),
}  # fmt: skip

HELD_OUT_TIMM: Row = {  # drawn from all that have at most 40 million parameters
    **timm_models("mobilenetv3_rw test_efficientnet_evos resnet33ts lowformer_b0 darknet17 efficientnet_blur_b0"
                  " xception41p convnext_pico regnety_080_tv repghostnet_130 cpubone_s0 convnextv2_femto"
                  " efficientvim_m4 lowformer_e3 fbnetc_100 efficientvim_m3_dist test_efficientnet_gn"
                  " tf_efficientnet_lite2 regnetx_040 efficientvim_m2_dist ese_vovnet19b_slim", size=96),
    **timm_models("pit_s_224 vit_srelpos_small_patch16_224 levit_conv_384 efficientvit_m5", size=96, img_size=96),
}  # fmt: skip

# -- transformers


def transformer(
    names: str, head: str, given: Callable[[], dict[str, Any]], config: dict[str, Any], suffix: str = ""
) -> Row:
    """names: ``llama:Llama``, of which LlamaConfig and LlamaForCausalLM are made. suffix: of the names of the rows."""

    def build(kind: str) -> Build:
        return of(
            "transformers",
            lambda t: (getattr(t, kind + head)(getattr(t, f"{kind}Config")(**config)), (), given()),
        )

    return {name + suffix: build(kind) for name, kind in (row.split(":") for row in names.split())}


def text(names: str, head: str, length: int = 32, labels: str = "tokens", suffix: str = "", **config: Any) -> Row:
    """labels: "tokens" (one for each), "classes" (one for each text), or "" for a loss outside of the model."""

    def given() -> dict[str, Any]:
        words = tokens(length)
        targets = {"tokens": words.clone, "classes": lambda: torch.randint(0, 2, (2,))}
        return {"input_ids": words} | ({"labels": targets[labels]()} if labels else {})

    return transformer(names, head, given, config, suffix)


def seen(names: str, head: str = "ForImageClassification", pixels: int = 64, **config: Any) -> Row:
    return transformer(names, head, lambda: {"pixel_values": images(2, pixels)}, config)


def clips(names: str, batch: int = 1, image_size: int = 64, **config: Any) -> Row:
    given = lambda: {"pixel_values": torch.randn(batch, 4, 3, image_size, image_size)}  # noqa: E731
    sizes = {"image_size": image_size, "num_frames": 4, **SIGHT}
    return transformer(names, "ForVideoClassification", given, {**sizes, **config})


def heard(names: str, suffix: str = "", **config: Any) -> Row:
    return transformer(names, "Model", lambda: {"input_values": torch.randn(2, 4000)}, {**SPEECH, **config}, suffix)


def made(build: Callable[[Any], Case]) -> Build:
    return of("transformers", build)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


SMALL = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 128}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0}
NO_HEAD_DIM = without(DECODER, "head_dim")
ENCODER = {**SMALL, "max_position_embeddings": 64, "pad_token_id": 0}
SIGHT = without(SMALL, "vocab_size")
PATCHES = {**SIGHT, "image_size": 64, "patch_size": 16}
WORDS = {**SMALL, "max_position_embeddings": 32, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
T5 = {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
BART = {
    "vocab_size": 100, "d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
NO_LENGTH = without(BART, "max_position_embeddings")
GPT = {"vocab_size": 100, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
BLOOM = {"vocab_size": 100, "hidden_size": 64, "n_layer": 4, "n_head": 4}
MAMBA = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "length": 16}
SPEECH = {
    **SMALL, "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 2), "conv_kernel": (10, 3, 2), "layerdrop": 0.0,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
}  # fmt: skip
SWIN = {"image_size": 64, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
CONVNEXT = {"hidden_sizes": [16, 32, 64, 64], "depths": [2, 2, 2, 2]}
RESNET = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2]}
CAUSAL, MASKED, CONDITIONAL = "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"


def _labelled(length: int = 16) -> dict[str, Any]:
    words = tokens(length)
    return {"input_ids": words, "labels": words.clone()}


def _clip(t: Any) -> Case:
    config = t.CLIPConfig(text_config=WORDS, vision_config=PATCHES, projection_dim=32)
    words = tokens()
    words[:, -1] = 2
    return t.CLIPModel(config), (), {"input_ids": words, "pixel_values": images(2, 64), "return_loss": True}


def _whisper(t: Any) -> Case:
    config = t.WhisperConfig(
        **without(BART, "max_position_embeddings", "forced_eos_token_id"), max_source_positions=50,
        max_target_positions=32, num_mel_bins=20, suppress_tokens=None,
    )  # fmt: skip
    given = {"input_features": torch.randn(2, 20, 100), "labels": tokens()}
    return t.WhisperForConditionalGeneration(config), (), given


TRANSFORMERS: Row = {
    **text("llama:Llama qwen2:Qwen2 qwen3:Qwen3 gemma2:Gemma2", CAUSAL, **DECODER),
    **text("mistral:Mistral", CAUSAL, sliding_window=16, **DECODER),
    "gemma3": made(lambda t: (t.Gemma3ForCausalLM(t.Gemma3TextConfig(**DECODER)), (), _labelled(32))),
    **text("phi:Phi phi3:Phi3 olmo2:Olmo2 stablelm:StableLm cohere:Cohere granite:Granite", CAUSAL, **NO_HEAD_DIM),
    **text("gpt2:GPT2", "LMHeadModel", **GPT),
    **text("gpt_neo:GPTNeo", CAUSAL, vocab_size=100, hidden_size=64, num_layers=4, num_heads=4,
           attention_types=[[["global", "local"], 2]], max_position_embeddings=64),
    **text("gpt_neox:GPTNeoX", CAUSAL, **ENCODER),
    **text("gptj:GPTJ", CAUSAL, rotary_dim=8, **GPT),
    **text("opt:OPT", CAUSAL, **without(ENCODER, "intermediate_size"), ffn_dim=128, word_embed_proj_dim=64),
    **text("bloom:Bloom", CAUSAL, **BLOOM),
    **text("falcon:Falcon", CAUSAL, **without(SMALL, "intermediate_size")),
    **text("mamba:Mamba", CAUSAL, **MAMBA),
    **text("mamba2:Mamba2", CAUSAL, num_heads=8, head_dim=8, n_groups=1, **MAMBA),
    **text("rwkv:Rwkv", CAUSAL, context_length=32, **MAMBA),
    **text("mixtral:Mixtral", CAUSAL, num_local_experts=4, **DECODER),
    **text("qwen2_moe:Qwen2Moe", CAUSAL, num_experts=4, moe_intermediate_size=64, shared_expert_intermediate_size=64,
           **NO_HEAD_DIM),
    **text("bert:Bert roberta:Roberta mpnet:MPNet", MASKED, **ENCODER),
    **text("bert:Bert", "ForSequenceClassification", labels="classes", suffix=", classes", **ENCODER),
    **text("bert:Bert", "Model", labels="", suffix=", loss outside", **ENCODER),
    **text("distilbert:DistilBert", MASKED, vocab_size=100, dim=64, n_layers=4, n_heads=4, hidden_dim=128,
           max_position_embeddings=64),
    **text("electra:Electra albert:Albert convbert:ConvBert", MASKED, embedding_size=32, **ENCODER),
    **text("squeezebert:SqueezeBert", MASKED, embedding_size=64, **ENCODER),
    **text("deberta:Deberta", MASKED, relative_attention=True, pos_att_type=["c2p", "p2c"], **ENCODER),
    **text("deberta_v2:DebertaV2", MASKED, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=16,
           **ENCODER),
    **text("modernbert:ModernBert", MASKED, **ENCODER, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    **text("funnel:Funnel", MASKED, vocab_size=100, block_sizes=[2, 2], d_model=64, n_head=4, d_head=16, d_inner=128),
    **text("xlnet:XLNet", "LMHeadModel", vocab_size=100, d_model=64, n_layer=3, n_head=4, d_inner=128),
    **text("longformer:Longformer", MASKED, attention_window=8, **ENCODER),
    **text("big_bird:BigBird", MASKED, attention_type="original_full", **ENCODER),
    **text("fnet:FNet", MASKED, **without(ENCODER, "num_attention_heads")),
    **text("nystromformer:Nystromformer", MASKED, num_landmarks=8, segment_means_seq_len=32, **ENCODER),
    **text("t5:T5 mt5:MT5", CONDITIONAL, **T5),
    **text("bart:Bart mbart:MBart pegasus:Pegasus", CONDITIONAL, **BART),
    **text("marian:Marian", "MTModel", **BART),
    **text("led:LED", CONDITIONAL, attention_window=8, max_encoder_position_embeddings=64,
           max_decoder_position_embeddings=64, **NO_LENGTH),
    "whisper": made(_whisper),
    "clip": made(_clip),
    **seen("vit:ViT deit:DeiT data2vec_vision:Data2VecVision", image_size=64, **SIGHT),
    **seen("beit:Beit", image_size=64, use_relative_position_bias=True, **SIGHT),
    **seen("swin:Swin swinv2:Swinv2", **SWIN),
    **seen("convnext:ConvNext convnextv2:ConvNextV2 poolformer:PoolFormer", **CONVNEXT),
    **seen("dinov2:Dinov2", **PATCHES),
    **seen("segformer:Segformer", "ForSemanticSegmentation", decoder_hidden_size=32, **CONVNEXT),
    **seen("resnet:ResNet", **RESNET),
    **seen("regnet:RegNet", groups_width=16, **RESNET),
    **seen("mobilevit:MobileViT", image_size=64, hidden_sizes=[32, 48, 64],
           neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 64]),
    **seen("pvt_v2:PvtV2 efficientnet:EfficientNet", image_size=64),
    **seen("levit:Levit", image_size=64, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4], depths=[2, 2, 2],
           key_dim=[8, 8, 8]),
    **seen("vit_mae:ViTMAE", "ForPreTraining", image_size=64, decoder_hidden_size=32, decoder_num_hidden_layers=2,
           decoder_num_attention_heads=4, decoder_intermediate_size=64, **SIGHT),
    **seen("siglip_vision:SiglipVision", "Model", **PATCHES),
    **seen("dpt:DPT", "ForDepthEstimation", image_size=64, backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=32,
           neck_hidden_sizes=[16, 32, 64, 64], readout_type="project", **SIGHT),
    **seen("glpn:GLPN", "ForDepthEstimation", hidden_sizes=[16, 32, 80, 64], decoder_hidden_size=32),
    **clips("videomae:VideoMAE", batch=2, image_size=32),
    **heard("wav2vec2:Wav2Vec2 hubert:Hubert wavlm:WavLM"),
}  # fmt: skip


def _detr(name: str) -> Build:
    backbone = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "layer_type": "basic",
                "out_features": ["stage4"]}  # fmt: skip
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder")
             for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    plain = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}

    def build(t: Any) -> Case:
        config = getattr(t, f"{name}Config")(
            backbone_config=t.ResNetConfig(**backbone), d_model=64, num_queries=8, **sizes, **plain
        )
        return getattr(t, f"{name}ForObjectDetection")(config), (), {"pixel_values": images(2, 64)}

    return made(build)


def _llava(t: Any) -> Case:
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**PATCHES), text_config=t.LlamaConfig(**DECODER), image_token_index=99,
        image_seq_length=16, vision_feature_select_strategy="default",
    )  # fmt: skip
    words = torch.cat((torch.full((2, 16), 99), tokens()), 1)
    given = {"input_ids": words, "pixel_values": images(2, 64), "labels": words.clone()}
    return t.LlavaForConditionalGeneration(config), (), given


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

HELD_OUT_TRANSFORMERS: Row = {
    # text, decoders
    **text("olmoe:Olmoe", CAUSAL, **EXPERTS, **NO_HEAD_DIM),
    **text("qwen3_moe:Qwen3Moe", CAUSAL, **EXPERTS, moe_intermediate_size=64, **DECODER),
    **text("gpt_oss:GptOss", CAUSAL, num_local_experts=4, num_experts_per_tok=2, **DECODER),
    **text("deepseek_v3:DeepseekV3", CAUSAL, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
           moe_intermediate_size=32, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
           v_head_dim=16, first_k_dense_replace=1, **without(NO_HEAD_DIM, "num_key_value_heads")),
    **text("falcon_mamba:FalconMamba", CAUSAL, **MAMBA),
    **text("jamba:Jamba", CAUSAL, num_experts=2, num_experts_per_tok=1, mamba_d_state=8, use_cache=False,
           **NO_HEAD_DIM),
    **text("recurrent_gemma:RecurrentGemma", CAUSAL, lru_width=64, attention_window_size=16,
           **without(NO_HEAD_DIM, "max_position_embeddings")),
    **text("lfm2:Lfm2", CAUSAL, layer_types=["conv", "full_attention"] * 2, **NO_HEAD_DIM),
    **text("starcoder2:Starcoder2", CAUSAL, **NO_HEAD_DIM),
    **text("glm4:Glm4 diffllama:DiffLlama", CAUSAL, **DECODER),
    **text("olmo3:Olmo3", CAUSAL, sliding_window=16, **NO_HEAD_DIM),
    **text("mpt:Mpt", CAUSAL, vocab_size=100, d_model=64, n_heads=4, n_layers=4, max_seq_len=64),
    **text("codegen:CodeGen", CAUSAL, rotary_dim=8, **GPT),
    **text("ctrl:CTRL", "LMHeadModel", vocab_size=100, n_embd=64, dff=128, n_layer=3, n_head=4, n_positions=64),
    **text("biogpt:BioGpt", CAUSAL, layerdrop=0.0, **ENCODER),
    # text, encoders
    **text("roformer:RoFormer", MASKED, embedding_size=64, **ENCODER),
    **text("ibert:IBert", MASKED, **ENCODER),
    **text("rembert:RemBert", MASKED, input_embedding_size=32, output_embedding_size=32, **ENCODER),
    **text("esm:Esm", MASKED, mask_token_id=4, **ENCODER),
    **text("big_bird:BigBird", MASKED, suffix=" block_sparse", attention_type="block_sparse", block_size=8, length=128,
           num_random_blocks=1, **{**ENCODER, "max_position_embeddings": 128}),
    **text("reformer:Reformer", "ModelWithLMHead", vocab_size=100, hidden_size=64, num_attention_heads=4,
           attention_head_size=16, feed_forward_size=128, attn_layers=["local", "lsh"], axial_pos_shape=[4, 8],
           axial_pos_embds_dim=[32, 32], local_attn_chunk_length=8, lsh_attn_chunk_length=8, num_buckets=4,
           is_decoder=True),
    # text, encoder and decoder
    **text("longt5:LongT5", CONDITIONAL, local_radius=7, global_block_size=4, **T5),
    **text("umt5:UMT5", CONDITIONAL, **T5),
    **text("switch_transformers:SwitchTransformers", CONDITIONAL, num_experts=4, num_sparse_encoder_layers=1,
           num_sparse_decoder_layers=1, num_decoder_layers=3, **T5),
    **text("m2m_100:M2M100", CONDITIONAL, suffix=" layerdrop", encoder_layerdrop=0.2, decoder_layerdrop=0.2, **BART),
    **text("blenderbot:Blenderbot", CONDITIONAL, **BART),
    **text("pegasus_x:PegasusX", CONDITIONAL, block_size=8, num_global_tokens=4, **BART),
    # images
    "detr": _detr("Detr"),
    "conditional_detr": _detr("ConditionalDetr"),
    **seen("yolos:Yolos", "ForObjectDetection", image_size=[64, 64], num_detection_tokens=8, **SIGHT),
    **seen("cvt:Cvt", embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    **seen("focalnet:FocalNet", image_size=64, embed_dim=24, depths=[2, 2], focal_levels=[2, 2], focal_windows=[3, 3]),
    **seen("mobilenet_v2:MobileNetV2", image_size=64),
    **seen("mobilevitv2:MobileViTV2", image_size=64, width_multiplier=0.5),
    **seen("bit:Bit", embedding_size=32, hidden_sizes=[32, 64, 64, 64], depths=[1, 2, 1, 1], num_groups=4),
    **seen("swiftformer:SwiftFormer", embed_dims=[16, 24, 32, 48], depths=[1, 1, 2, 1]),
    **clips("timesformer:Timesformer"),
    **clips("vivit:Vivit", tubelet_size=[2, 16, 16]),
    # sound
    **heard("wav2vec2:Wav2Vec2", " layerdrop", layerdrop=0.2),
    **heard("wav2vec2:Wav2Vec2", " masking", mask_time_prob=0.3, mask_time_length=2),
    **heard("sew:SEW", squeeze_factor=2),
    **heard("unispeech_sat:UniSpeechSat"),
    "ast": made(lambda t: (t.ASTForAudioClassification(t.ASTConfig(max_length=64, num_mel_bins=32, **SIGHT)), (),
                           {"input_values": torch.randn(2, 64, 32)})),
    # several kinds at once, and others
    "llava": made(_llava),
}  # fmt: skip

# -- one of our own


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


OWN: Row = {"unet": lambda: (UNet(), (images(4, 64),), {})}

LIBRARIES: dict[str, Mapping[str, Build]] = {
    "torchvision": TORCHVISION, "timm": TIMM, "transformers": TRANSFORMERS, "own": OWN,
}  # fmt: skip
HELD_OUT: dict[str, Mapping[str, Build]] = {
    "torchvision": HELD_OUT_TORCHVISION, "timm": HELD_OUT_TIMM, "transformers": HELD_OUT_TRANSFORMERS,
}  # fmt: skip
