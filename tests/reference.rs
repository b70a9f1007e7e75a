//! The embedded engine against transformers on real weights.
//!
//! Runs where `models/weights/smollm2-135m-instruct` holds the Q4_1 GGUF file (`.ci/run` fetches it, and so does the
//! quick start); `EAGLET_SMOLLM2` names another place.

use std::path::PathBuf;

use burn::tensor::{Device, Tensor};
use eaglet::target::generate::{Request, Sampler, argmax, generate, host_rows};
use eaglet::target::{Message, Rendering, TargetFiles, TargetModel};
use safetensors::SafeTensors;

fn weights() -> Option<TargetFiles> {
    let place = std::env::var_os("EAGLET_SMOLLM2")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/weights/smollm2-135m-instruct"));
    let found = TargetFiles::open(&place).ok();
    if found.is_none() {
        assert!(std::env::var_os("EAGLET_NEED_SMOLLM2").is_none(), "no SmolLM2 weights at {}", place.display());
        eprintln!("skipped: no SmolLM2 weights at {}", place.display());
    }
    found
}

fn i64s(file: &SafeTensors, name: &str) -> Vec<i64> {
    file.tensor(name).unwrap().data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
}

fn f32s(file: &SafeTensors, name: &str) -> Vec<f32> {
    file.tensor(name).unwrap().data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn relative(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(a - b)))
        / norm(&mut expected.iter().map(|&v| f64::from(v)))
}

#[test]
fn smollm2_agrees_with_transformers() {
    let Some(files) = weights() else { return };
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/smollm2.safetensors")).unwrap();
    let reference = SafeTensors::deserialize(&bytes).unwrap();
    let device = Device::flex();
    let model = TargetModel::load(&files.config, &files, &device).unwrap();
    let documents: Vec<Vec<u32>> =
        (0..3).map(|n| i64s(&reference, &format!("{n}.token_ids")).iter().map(|&id| id as u32).collect()).collect();
    // Packed: the first document must not see the others.
    let views: Vec<&[u32]> = documents.iter().map(Vec::as_slice).collect();
    let pass = model.prefill(&views, &[2, 15, 27]);
    let logits = host_rows(model.logits(pass.last.clone()));
    let vocab = files.config.vocab_size;
    let mut at = 0;
    for (n, document) in documents.iter().enumerate() {
        let expected = f32s(&reference, &format!("{n}.hidden_states"));
        let width = files.config.hidden_size;
        for (slot, states) in pass.aux.iter().chain([&pass.last]).enumerate() {
            let found = host_rows(Tensor::clone(states).narrow(0, at, document.len()));
            let expected: Vec<f32> = expected
                .chunks_exact(4 * width)
                .flat_map(|row| row[slot * width..(slot + 1) * width].iter().copied())
                .collect();
            let off = relative(&found, &expected);
            assert!(off < 1e-3, "document {n}, slot {slot}: relative norm of the difference {off}");
        }
        let (top, values) = (i64s(&reference, &format!("{n}.top5_ids")), f32s(&reference, &format!("{n}.top5_logits")));
        for t in 0..document.len() {
            if values[t * 5] - values[t * 5 + 1] > 1e-2 {
                let row = &logits[(at + t) * vocab..(at + t + 1) * vocab];
                assert_eq!(argmax(row) as i64, top[t * 5], "document {n}, token {t}");
            }
        }
        at += document.len();
    }

    // Greedy continuations, all three in one batch through the KV cache.
    let prompts: Vec<usize> = (0..3).map(|n| i64s(&reference, &format!("{n}.prompt_length"))[0] as usize).collect();
    let requests: Vec<Request> = documents
        .iter()
        .zip(&prompts)
        .map(|(ids, &n)| Request { name: "r".into(), prompt: ids[..n].to_vec(), max_tokens: ids.len() - n })
        .collect();
    for batch in [3, 2] {
        let mut answers = 0;
        generate(
            &model,
            &requests,
            Sampler::GREEDY,
            batch,
            1,
            |_| {},
            |answer| {
                let wanted = &documents[answer.request][prompts[answer.request]..];
                assert_eq!(answer.output, wanted, "continuation of document {}", answer.request);
                answers += 1;
                true
            },
        );
        assert_eq!(answers, 3);
    }
}

#[test]
fn the_gguf_tokenizer_writes_the_reference_prompts() {
    let Some(files) = weights() else { return };
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/smollm2.safetensors")).unwrap();
    let reference = SafeTensors::deserialize(&bytes).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let facts = metadata.metadata().as_ref().unwrap();
    let tokenizer = files.tokenizer().unwrap();
    for n in 0..3 {
        let message = Message::new("user", facts[&format!("prompt{n}")].clone());
        let length = i64s(&reference, &format!("{n}.prompt_length"))[0] as usize;
        let ids: Vec<u32> = i64s(&reference, &format!("{n}.token_ids"))[..length].iter().map(|&id| id as u32).collect();
        assert_eq!(
            tokenizer.prompt_ids(std::slice::from_ref(&message), Rendering::default()).unwrap(),
            ids,
            "prompt {n}"
        );
        assert_eq!(tokenizer.decode(&ids).unwrap(), tokenizer.render(&[message], Rendering::default()).unwrap());
    }
}

/// Tiny seeded models of the other architectures and RoPE scalings, with the states that transformers gives them
/// (`tests/reference/make.py`). Weights of 0.2 deviation make states large, so agreement is relative.
#[test]
fn other_architectures_agree_with_transformers() {
    for name in ["llama3-rope", "llama-yarn-tied", "mistral", "qwen2", "qwen3"] {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(name);
        let files = TargetFiles::open(&folder).unwrap();
        let model = TargetModel::load(&files.config, &files, &Device::flex()).unwrap();
        let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let ids: Vec<u32> = i64s(&expected, "token_ids").iter().map(|&id| id as u32).collect();
        // Behind another document, which it must not see.
        let pass = model.prefill(&[&ids[..9], &ids], &[1, 2]);
        let states = f32s(&expected, "hidden_states");
        let width = files.config.hidden_size;
        for (slot, found) in pass.aux.iter().chain([&pass.last]).enumerate() {
            let found = host_rows(Tensor::clone(found).narrow(0, 9, ids.len()));
            let wanted: Vec<f32> = states
                .chunks_exact(3 * width)
                .flat_map(|row| row[slot * width..(slot + 1) * width].iter().copied())
                .collect();
            let off = relative(&found, &wanted);
            assert!(off < 1e-4, "{name}, slot {slot}: relative norm of the difference {off}");
        }
        let logits = host_rows(model.logits(pass.last.narrow(0, 9, ids.len())));
        let off = relative(&logits, &f32s(&expected, "logits"));
        assert!(off < 1e-4, "{name}: logits are off by {off}");
    }
}
