//! A seeded target of a few thousand weights, in memory and as a Hugging Face folder.
#![allow(dead_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::Device;
use eaglet::draft::config::DraftConfig;
use eaglet::draft::head::{DraftHead, HeadTensors, HostArray};
use eaglet::draft::vocab::DraftVocab;
use eaglet::target::{HostTensor, Rope, RopeScaling, TargetConfig, TargetModel};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

pub const VOCAB: usize = 48;

pub fn config() -> TargetConfig {
    TargetConfig {
        model_type: "llama".into(),
        vocab_size: VOCAB,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        max_position_embeddings: 512,
        tie_word_embeddings: false,
        qkv_bias: false,
        qk_norm: false,
        bos_token_id: Some(0),
        eos_token_ids: vec![1],
    }
}

fn random(rng: &mut ChaCha8Rng, shape: &[usize], scale: f32) -> Vec<f32> {
    (0..shape.iter().product::<usize>()).map(|_| rng.random_range(-scale..scale)).collect()
}

pub fn weights(seed: u64) -> HashMap<String, HostTensor> {
    let c = config();
    let (q, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let (h, f) = (c.hidden_size, c.intermediate_size);
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_string(), vec![VOCAB, h]),
        ("model.norm.weight".into(), vec![h]),
        ("lm_head.weight".into(), vec![VOCAB, h]),
    ];
    for i in 0..c.num_hidden_layers {
        for (name, shape) in [
            ("input_layernorm", vec![h]),
            ("post_attention_layernorm", vec![h]),
            ("self_attn.q_proj", vec![q, h]),
            ("self_attn.k_proj", vec![kv, h]),
            ("self_attn.v_proj", vec![kv, h]),
            ("self_attn.o_proj", vec![h, q]),
            ("mlp.gate_proj", vec![f, h]),
            ("mlp.up_proj", vec![f, h]),
            ("mlp.down_proj", vec![h, f]),
        ] {
            shapes.push((format!("model.layers.{i}.{name}.weight"), shape));
        }
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let tensors = shapes.into_iter().map(|(name, shape)| {
        let data = match shape.len() {
            1 => random(&mut rng, &shape, 0.2).iter().map(|x| x + 1.0).collect(),
            _ => random(&mut rng, &shape, 0.4),
        };
        (name, HostTensor { shape, data })
    });
    tensors.collect()
}

pub fn model(seed: u64) -> TargetModel {
    TargetModel::load(&config(), &weights(seed), &Device::flex()).unwrap()
}

/// A head nobody trained: it is sometimes right all the same, in so small a vocabulary.
pub fn head(seed: u64, draft_vocab: usize) -> (DraftHead, DraftVocab) {
    let c = config();
    let config = DraftConfig {
        hidden_size: c.hidden_size,
        target_hidden_size: c.hidden_size,
        intermediate_size: 40,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        vocab_size: VOCAB,
        draft_vocab_size: draft_vocab,
        aux_layers: vec![1, 2, 3],
        ..DraftConfig::default()
    };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let tensors: HeadTensors = config
        .tensor_shapes()
        .into_iter()
        .map(|(name, shape)| {
            let data = if shape.len() == 1 { vec![1.0; shape[0]] } else { random(&mut rng, &shape, 0.3) };
            (name, HostArray { shape, data })
        })
        .collect();
    let (vocab, _) = DraftVocab::count(std::iter::empty(), draft_vocab, VOCAB, &[]).unwrap();
    (DraftHead::from_tensors(config, &tensors, &Device::flex()).unwrap(), vocab)
}

/// Writes the target as a Hugging Face folder.
pub fn write_target(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let c = config();
    let json = serde_json::json!({
        "model_type": c.model_type, "vocab_size": VOCAB, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim, "rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_position_embeddings, "tie_word_embeddings": false,
        "bos_token_id": 0, "eos_token_id": 1,
    });
    std::fs::write(folder.join("config.json"), json.to_string()).unwrap();
    let data: Vec<(String, Vec<usize>, Vec<u8>)> = weights(1)
        .into_iter()
        .map(|(name, t)| (name, t.shape, t.data.iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let views = data.iter().map(|(n, s, b)| (n.as_str(), TensorView::new(Dtype::F32, s.clone(), b).unwrap()));
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let mut vocab: serde_json::Map<String, serde_json::Value> =
        (0..VOCAB).map(|id| (format!("w{id}"), serde_json::json!(id))).collect();
    for (id, special) in ["<s>", "</s>"].iter().enumerate() {
        vocab.remove(&format!("w{id}"));
        vocab.insert(special.to_string(), serde_json::json!(id));
    }
    let special = |id: usize, content: &str| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                           "normalized": false, "special": true})
    };
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<s>"), special(1, "</s>")],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w2"},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template =
        "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<s>{% endif %}";
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
}

/// A folder with the target, `sequences` training sequences, four held-out ones and a recipe that trains in seconds.
pub fn write_project(folder: &Path, sequences: usize) -> PathBuf {
    write_target(&folder.join("target"));
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut line = |id: String| {
        let prompt: Vec<u32> = (0..rng.random_range(2..6)).map(|_| rng.random_range(2..VOCAB as u32)).collect();
        let output: Vec<u32> = (0..rng.random_range(8..24)).map(|_| rng.random_range(2..VOCAB as u32)).collect();
        let end = output.len();
        serde_json::json!({"id": id, "dataset": if end.is_multiple_of(2) { "even" } else { "odd" }, "prompt_ids": prompt,
            "output_ids": output, "finish_reason": "length", "sampling": null,
            "segments": [{"kind": "answer", "start": 0, "end": end}]})
        .to_string()
            + "\n"
    };
    let train: String = (0..sequences).map(|i| line(format!("t{i}"))).collect();
    let held_out: String = (0..4).map(|i| line(format!("h{i}"))).collect();
    std::fs::write(folder.join("train.jsonl"), train).unwrap();
    std::fs::write(folder.join("held_out.jsonl"), held_out).unwrap();
    let recipe = r#"
[target]
path = "target"

[data]
train = ["train.jsonl"]
held_out = ["held_out.jsonl"]

[features]
layers = [1, 2, 3]
cache = "../features"
dtype = "f32"

[draft]
vocab_size = 40

[train]
out = "run"
epochs = 20
pack_tokens = 40
accumulate = 2
ttt_steps = 3
lr = 1e-2
evaluate_every = 13
checkpoint_every = 5

[evaluate]
max_tokens = 12
"#;
    let path = folder.join("recipe.toml");
    std::fs::write(&path, recipe).unwrap();
    path
}

/// The binary with its arguments and quiet logs.
pub fn eaglet(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eaglet"));
    command.args(arguments).env("NO_COLOR", "1");
    command
}
