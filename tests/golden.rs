//! The TTT step against golden vectors: losses and gradients that speculators 0.9.0 computed.
//!
//! Reads tests/golden and, where `EAGLET_GOLDEN` names a folder, every file there too.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use eaglet::draft::acceptance::ChainCounts;
use eaglet::draft::config::DraftConfig;
use eaglet::draft::head::DraftHead;
use eaglet::draft::head::{HeadTensors, HostArray};
use eaglet::draft::ttt::{Document, Objective, Teacher, step};
use eaglet::recipe::LossKind;
use eaglet::target::rope::RopeTable;
use eaglet::target::{Rope, RopeScaling};
use safetensors::{Dtype, SafeTensors};

struct Golden<'a> {
    tensors: SafeTensors<'a>,
    facts: HashMap<String, String>,
}

impl Golden<'_> {
    fn f32(&self, name: &str) -> HostArray {
        let view = self.tensors.tensor(name).unwrap();
        assert_eq!(view.dtype(), Dtype::F32, "{name}");
        let data = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        HostArray { shape: view.shape().to_vec(), data }
    }

    fn i64(&self, name: &str) -> Vec<i64> {
        let view = self.tensors.tensor(name).unwrap();
        view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        self.tensors.tensor(name).unwrap().data().to_vec()
    }

    fn fact<T: std::str::FromStr<Err: std::fmt::Debug>>(&self, name: &str) -> T {
        self.facts[name].parse().unwrap()
    }

    fn scalar(&self, name: &str) -> f64 {
        self.f32(name).data[0] as f64
    }
}

fn files() -> Vec<PathBuf> {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let folders = [Some(ours), std::env::var_os("EAGLET_GOLDEN").map(PathBuf::from)];
    let mut files = Vec::new();
    for folder in folders.into_iter().flatten() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            // The target's reference states are another test's matter.
            if name.ends_with(".safetensors") && !name.contains("reference") {
                files.push(path);
            }
        }
    }
    files.sort();
    assert!(files.len() >= 7, "golden files are missing: {files:?}");
    files
}

fn tensor2(array: &HostArray, device: &Device) -> Tensor<2> {
    let shape = match array.shape[..] {
        [n] => [1, n],
        [m, n] => [m, n],
        _ => panic!("rank {}", array.shape.len()),
    };
    Tensor::from_data(TensorData::new(array.data.clone(), shape), device)
}

fn check(path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let golden =
        Golden { tensors: SafeTensors::deserialize(&bytes).unwrap(), facts: metadata.metadata().clone().unwrap() };
    let device = Device::flex();
    let flags: BTreeMap<String, bool> = serde_json::from_str(&golden.facts["flags"]).unwrap();
    let flag = |name: &str| flags.get(name).copied().unwrap_or(false);
    let hidden = golden.fact("hidden_size");
    let config = DraftConfig {
        hidden_size: hidden,
        target_hidden_size: hidden,
        intermediate_size: golden.fact("intermediate_size"),
        num_attention_heads: golden.fact("num_attention_heads"),
        num_key_value_heads: golden.fact("num_key_value_heads"),
        head_dim: golden.fact("head_dim"),
        rms_norm_eps: golden.fact("rms_norm_eps"),
        rope: Rope { theta: golden.fact("rope_theta"), scaling: RopeScaling::None },
        vocab_size: golden.fact("vocab_size"),
        draft_vocab_size: golden.fact("draft_vocab_size"),
        aux_layers: vec![1, 2, 3],
        norm_before_residual: flag("norm_before_residual"),
        norm_before_fc: flag("norm_before_fc"),
        fc_norm: flag("fc_norm"),
        norm_output: flag("norm_output"),
        ..Default::default()
    };
    let tensors: HeadTensors = config
        .tensor_shapes()
        .keys()
        .map(|name| (name.clone(), golden.f32(&format!("param.{}", name.replace("midlayer.", "layers.0.")))))
        .collect();
    let head = DraftHead::from_tensors(config, &tensors, &device).unwrap();
    let teacher = Teacher {
        embeddings: tensor2(&golden.f32("param.embed_tokens.weight"), &device),
        norm: tensor2(&golden.f32("param.verifier_norm.weight"), &device),
        rms_norm_eps: golden.fact("rms_norm_eps"),
        head_rows: tensor2(&golden.f32("param.verifier_lm_head.weight"), &device),
    };
    let (ids, mask) = (golden.i64("in.token_ids"), golden.bytes("in.loss_mask"));
    let (aux, last) = (golden.f32("in.aux_hidden_states"), golden.f32("in.last_hidden_state"));
    let mut at = 0;
    let documents: Vec<Document> = golden
        .i64("in.lengths")
        .iter()
        .map(|&n| {
            let rows = at..at + n as usize;
            at = rows.end;
            let cut = |x: &HostArray| x.data[rows.start * x.shape[1]..rows.end * x.shape[1]].to_vec();
            Document {
                ids: ids[rows.clone()].iter().map(|&id| id as u32).collect(),
                loss_mask: mask[rows.clone()].iter().map(|&m| m != 0).collect(),
                aux: cut(&aux),
                last: cut(&last),
            }
        })
        .collect();
    let objective = Objective {
        loss: match golden.facts["loss"].as_str() {
            "kl_div" => LossKind::KlDiv,
            "ce" => LossKind::Ce,
            "nla" => LossKind::Nla,
            "lk_hybrid" => LossKind::LkHybrid,
            other => panic!("unknown loss {other}"),
        },
        steps: golden.fact("ttt_steps"),
        decay: golden.fact("step_loss_decay"),
    };
    let rope = RopeTable::new(&head.config.rope, head.config.head_dim, 512, &device);
    let views: Vec<_> = documents.iter().map(|d| (&d.ids[..], &d.loss_mask[..])).collect();
    let counts = eaglet::draft::ttt::Layout::new(&views, objective.steps).counts();
    let trained: Vec<String> = head.weights().keys().cloned().collect();
    let output = step(&head, &teacher, &rope, &documents, objective, &counts, &trained);

    let expected = golden.scalar("out.loss");
    assert!((output.loss - expected).abs() / expected.abs() < 1e-5, "{path:?}: loss {} for {expected}", output.loss);
    // speculators counts a row as right at step k when it was counted and right at every earlier step, too.
    let mut chains = ChainCounts::new(objective.steps);
    chains.add(&output.layout, |k, i| output.steps[k].draft_top[i] == output.steps[k].target_top[i]);
    for (k, &rows) in counts.iter().enumerate() {
        assert_eq!(
            chains.held[k] as f64,
            golden.scalar(&format!("out.full_acc_{k}_sum")),
            "{path:?}: hits at step {k}"
        );
        assert_eq!(rows as f64, golden.scalar(&format!("out.full_acc_{k}_total")), "{path:?}: rows at step {k}");
    }
    for name in &trained {
        let expected = golden.f32(&format!("grad.{}", name.replace("midlayer.", "layers.0.")));
        let found: Vec<f32> = output.gradients[name].to_data().try_to_vec().unwrap();
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
        let difference = norm(&mut found.iter().zip(&expected.data).map(|(a, b)| (a - b) as f64));
        let size = norm(&mut expected.data.iter().map(|&v| v as f64));
        assert!(difference / size < 1e-4, "{path:?}: gradient of {name} is off by {}", difference / size);
    }
}

#[test]
fn the_step_matches_every_golden_file() {
    for path in files() {
        check(&path);
    }
}
