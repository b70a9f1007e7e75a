//! Reads a head's folder: ours, the EAGLE authors' or speculators'.

use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::ExportError;
use super::config_json::{from_json, layer_note};
use crate::draft::config::DraftConfig;
use crate::draft::head::{HeadTensors, HostArray};
use crate::draft::vocab::DraftVocab;
use crate::target::weights::floats;

/// How a folder's config.json is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadFormat {
    /// `LlamaForCausalLMEagle3`: one level of keys, `norm_before_residual` off unless it says so.
    Plain,
    /// speculators': the layer's keys in `transformer_layer_config`, `norm_before_residual` on unless it says so.
    Speculators,
}

/// A head from disk.
#[derive(Debug, Clone)]
pub struct ReadHead {
    pub config: DraftConfig,
    pub vocab: DraftVocab,
    /// Under `midlayer.*` names, whatever the file's.
    pub tensors: HeadTensors,
    pub format: HeadFormat,
    /// What was passed over or taken one way of two, for a person to read; none of it keeps the head from being used.
    pub notes: Vec<String>,
}

/// Reads config.json and model.safetensors. Weights are named `midlayer.*` or `layers.0.*`, in float32, float16 or
/// bfloat16.
///
/// A file may hold more than a head needs: `embed_tokens.weight` and `verifier_*` are passed over, since the target's
/// own are used, and `t2d`, which says nothing that `d2t` does not. It may lack `d2t` where the draft vocabulary is
/// the target's whole one. It may not lack `lm_head.weight`, though engines then share the target's.
///
/// # Errors
/// When a file is missing or torn, or a weight is missing, unknown, of another shape or not finite. Each names the
/// file and the reason; no content makes it panic.
pub fn read_head(folder: &Path) -> Result<ReadHead, ExportError> {
    let config_path = folder.join("config.json");
    let fail = |path: &Path, reason: String| ExportError::File { path: path.to_path_buf(), reason };
    let text = std::fs::read_to_string(&config_path)
        .map_err(|source| ExportError::Io { path: config_path.clone(), source })?;
    let json: Value = serde_json::from_str(&text).map_err(|e| fail(&config_path, format!("not JSON: {e}")))?;
    let config = from_json(&json).map_err(|reason| fail(&config_path, reason))?;
    let path = folder.join("model.safetensors");
    if !path.exists() {
        if folder.join("pytorch_model.bin").exists() {
            let reason = "is not there; pytorch_model.bin is a pickle, which can run code when it is read: convert it \
                          to model.safetensors first";
            return Err(fail(&path, reason.into()));
        }
        if folder.join("model.safetensors.index.json").exists() {
            return Err(fail(&path, "is not there; join the shards of model.safetensors.index.json first".into()));
        }
    }
    let bytes = std::fs::read(&path).map_err(|source| ExportError::Io { path: path.clone(), source })?;
    let Parts { vocab, tensors, mut notes } = parse(&bytes, &config).map_err(|reason| fail(&path, reason))?;
    notes.extend(layer_note(&json));
    let speculators = json.get("transformer_layer_config").is_some_and(Value::is_object);
    let format = if speculators { HeadFormat::Speculators } else { HeadFormat::Plain };
    Ok(ReadHead { config, vocab, tensors, format, notes })
}

/// What model.safetensors holds.
struct Parts {
    vocab: DraftVocab,
    tensors: HeadTensors,
    notes: Vec<String>,
}

fn parse(bytes: &[u8], config: &DraftConfig) -> Result<Parts, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| format!("torn: {e}"))?;
    let shapes = config.tensor_shapes();
    let mut tensors = HeadTensors::new();
    let mut notes = Vec::new();
    let (mut vocab, mut t2d) = (None, None);
    for (name, view) in file.iter() {
        let ours = name.strip_prefix("layers.0.").map_or(name.to_string(), |rest| format!("midlayer.{rest}"));
        match ours.as_str() {
            "embed_tokens.weight" => {
                notes.push("its `embed_tokens.weight` is passed over; the target's own embeddings are used".into());
                continue;
            }
            "verifier_norm.weight" | "verifier_lm_head.weight" => continue,
            "t2d" => {
                t2d = Some(view.data().iter().map(|&byte| byte != 0).collect::<Vec<bool>>());
                continue;
            }
            "d2t" => {
                vocab = Some(read_d2t(&view, config)?);
                continue;
            }
            _ => {}
        }
        let Some(shape) = shapes.get(&ours) else {
            return Err(format!("unknown tensor `{name}`: config.json calls for no such weight"));
        };
        if view.shape() != shape {
            return Err(format!("`{name}` has shape {:?}, config.json says {shape:?}", view.shape()));
        }
        let data = floats(view.dtype(), view.data())
            .ok_or_else(|| format!("`{name}` has type {:?}; F32, F16 and BF16 are read", view.dtype()))?;
        if data.iter().any(|x| !x.is_finite()) {
            return Err(format!("`{name}` holds a value that is not finite"));
        }
        if tensors.insert(ours, HostArray { shape: shape.clone(), data }).is_some() {
            return Err(format!("`{name}` is there twice, as `midlayer.*` and as `layers.0.*`"));
        }
    }
    if let Some(name) = shapes.keys().find(|name| !tensors.contains_key(*name)) {
        let shared = match name == "lm_head.weight" {
            true => "; engines then share the target's head, write those rows into the file",
            false => "",
        };
        return Err(format!("no tensor `{name}`{shared}"));
    }
    let vocab = match vocab {
        Some(vocab) => vocab,
        None if config.draft_vocab_size == config.vocab_size => DraftVocab::whole(config.vocab_size),
        None => return Err("no tensor `d2t`, though the draft vocabulary is a part of the target's".into()),
    };
    if t2d.is_some_and(|t2d| t2d != vocab.t2d()) {
        notes.push("its `t2d` does not fit its `d2t`, which is used; one of them is stale".into());
    }
    Ok(Parts { vocab, tensors, notes })
}

fn read_d2t(view: &TensorView, config: &DraftConfig) -> Result<DraftVocab, String> {
    let (dtype, shape) = (view.dtype(), view.shape());
    if shape != [config.draft_vocab_size] {
        return Err(format!("`d2t` has shape {shape:?}, config.json says [{}]", config.draft_vocab_size));
    }
    let bytes = view.data();
    let offsets: Vec<i64> = match dtype {
        Dtype::I64 => bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default())).collect(),
        Dtype::I32 => {
            bytes.chunks_exact(4).map(|b| i64::from(i32::from_le_bytes(b.try_into().unwrap_or_default()))).collect()
        }
        _ => return Err(format!("`d2t` has type {dtype:?}; I64 and I32 are read")),
    };
    DraftVocab::from_d2t(&offsets, config.vocab_size).map_err(|e| e.to_string())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::config_json::to_json;
    use super::super::write_head;
    use super::*;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    /// A small head; weights count up in thirds, so that bfloat16 rounds them.
    pub fn head(draft_vocab: usize) -> (DraftConfig, DraftVocab, HeadTensors) {
        let config = DraftConfig {
            hidden_size: 8,
            target_hidden_size: 8,
            intermediate_size: 6,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim: 4,
            vocab_size: 20,
            draft_vocab_size: draft_vocab,
            aux_layers: vec![1, 2, 3],
            ..DraftConfig::default()
        };
        let ids: Vec<u32> = vec![19; 3];
        let (vocab, _) = DraftVocab::count([(&ids[..], &[true; 3][..])].into_iter(), draft_vocab, 20, &[]).unwrap();
        let tensors = weights(&config);
        (config, vocab, tensors)
    }

    pub fn weights(config: &DraftConfig) -> HeadTensors {
        let shapes = config.tensor_shapes().into_iter();
        let array = |(name, shape): (String, Vec<usize>)| {
            let size: usize = shape.iter().product();
            (name, HostArray { shape, data: (0..size).map(|i| i as f32 * 0.3 - 1.0).collect() })
        };
        shapes.map(array).collect()
    }

    /// One tensor of a hand-made file.
    type Raw = (String, Dtype, Vec<usize>, Vec<u8>);

    fn raw(draft_vocab: usize) -> Vec<Raw> {
        let (_, vocab, tensors) = head(draft_vocab);
        let mut raw: Vec<Raw> = tensors
            .into_iter()
            .map(|(name, array)| (name, Dtype::F32, array.shape, bytemuck::cast_slice(&array.data).to_vec()))
            .collect();
        raw.push(("d2t".into(), Dtype::I64, vec![draft_vocab], bytemuck::cast_slice(&vocab.d2t()).to_vec()));
        raw
    }

    fn serialized(raw: &[Raw]) -> Vec<u8> {
        let views = raw.iter().map(|(name, dtype, shape, data)| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), data).expect("the data fills the shape"))
        });
        safetensors::serialize(views, None).unwrap()
    }

    fn write(folder: &Path, raw: &[Raw], config: &Value) {
        std::fs::write(folder.join("model.safetensors"), serialized(raw)).unwrap();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    }

    #[test]
    fn a_written_head_is_read_back() {
        for draft_vocab in [10, 20] {
            let (config, vocab, tensors) = head(draft_vocab);
            let folder = tempfile::tempdir().unwrap();
            let place = folder.path().join("head");
            write_head(&place, &config, &vocab, &tensors, "llama", &["vllm".into()]).unwrap();
            let read = read_head(&place).unwrap();
            assert_eq!((&read.config, &read.vocab), (&config, &vocab));
            assert_eq!((read.format, read.notes), (HeadFormat::Plain, vec![]));
            assert_eq!(read.tensors["norm.weight"].data[1], half::bf16::from_f32(0.3 - 1.0).to_f32());
        }
    }

    #[test]
    fn both_namings_and_all_float_types_are_read() {
        let (config, vocab, tensors) = head(10);
        let folder = tempfile::tempdir().unwrap();
        let json = to_json(&config, "llama");
        let mut file = raw(10);
        file.iter_mut().for_each(|(name, ..)| *name = name.replace("midlayer.", "layers.0."));
        write(folder.path(), &file, &json);
        let read = read_head(folder.path()).unwrap();
        assert_eq!((&read.vocab, &read.tensors), (&vocab, &tensors));

        type Rounded = (Dtype, fn(f32) -> [u8; 2], f32);
        let halves: [Rounded; 2] = [
            (Dtype::F16, |x| half::f16::from_f32(x).to_le_bytes(), half::f16::from_f32(-0.7).to_f32()),
            (Dtype::BF16, |x| half::bf16::from_f32(x).to_le_bytes(), half::bf16::from_f32(-0.7).to_f32()),
        ];
        for (dtype, round, wanted) in halves {
            let mut file = raw(10);
            for (name, held, _, data) in file.iter_mut().filter(|(name, ..)| name != "d2t") {
                *held = dtype;
                *data = tensors[name.as_str()].data.iter().flat_map(|&x| round(x)).collect();
            }
            write(folder.path(), &file, &json);
            let read = read_head(folder.path()).unwrap();
            assert!((read.tensors["norm.weight"].data[1] - wanted).abs() < 1e-6);
        }
    }

    #[test]
    fn what_other_trainers_leave_in_the_file_is_passed_over() {
        let (config, vocab, tensors) = head(10);
        let folder = tempfile::tempdir().unwrap();
        let json = to_json(&config, "llama");
        let mut file = raw(10);
        for name in ["embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"] {
            file.push((name.into(), Dtype::F32, vec![2, 2], vec![0; 16]));
        }
        let t2d = vocab.t2d().iter().map(|&is_in| u8::from(is_in)).collect();
        file.push(("t2d".into(), Dtype::BOOL, vec![20], t2d));
        write(folder.path(), &file, &json);
        let read = read_head(folder.path()).unwrap();
        assert_eq!(read.tensors, tensors);
        assert!(read.notes.len() == 1 && read.notes[0].contains("embed_tokens"), "{:?}", read.notes);

        // A stale t2d is told of, an int32 d2t is read.
        file.last_mut().unwrap().3 = vec![0; 20];
        let d2t = file.iter_mut().find(|(name, ..)| name == "d2t").unwrap();
        let narrow: Vec<u8> = vocab.d2t().iter().flat_map(|&offset| (offset as i32).to_le_bytes()).collect();
        (d2t.1, d2t.3) = (Dtype::I32, narrow);
        write(folder.path(), &file, &json);
        let read = read_head(folder.path()).unwrap();
        assert_eq!(read.vocab, vocab);
        assert!(read.notes.iter().any(|note| note.contains("stale")), "{:?}", read.notes);

        // d2t is due only where the draft vocabulary is a part.
        let (config, vocab, _) = head(20);
        let mut file = raw(20);
        file.retain(|(name, ..)| name != "d2t");
        write(folder.path(), &file, &to_json(&config, "llama"));
        assert_eq!(read_head(folder.path()).unwrap().vocab, vocab);
    }

    #[test]
    fn a_head_of_speculators_is_read() {
        let (config, vocab, tensors) = head(10);
        let folder = tempfile::tempdir().unwrap();
        let mut file = raw(10);
        file.iter_mut().for_each(|(name, ..)| *name = name.replace("midlayer.", "layers.0."));
        // Laid out as speculators 0.9 saves it.
        let json = serde_json::json!({
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
            "draft_vocab_size": 10, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "target_hidden_size": null,
            "norm_before_residual": true, "embed_requires_grad": false, "tie_word_embeddings": false,
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}},
            "transformer_layer_config": {"model_type": "llama", "hidden_size": 8, "intermediate_size": 6,
                "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
                "vocab_size": 20, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": false,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "max_position_embeddings": 2048},
        });
        write(folder.path(), &file, &json);
        let read = read_head(folder.path()).unwrap();
        assert_eq!(read.format, HeadFormat::Speculators);
        assert_eq!(read.config, DraftConfig { norm_before_residual: true, ..config });
        assert_eq!((read.vocab, read.tensors), (vocab, tensors));
    }

    #[test]
    fn wrong_files_are_named_with_the_reason() {
        let (config, _, _) = head(10);
        let folder = tempfile::tempdir().unwrap();
        let json = to_json(&config, "llama");
        let says = |change: &dyn Fn(&mut Vec<Raw>), config: &DraftConfig, wanted: &str| {
            let mut file = raw(10);
            change(&mut file);
            write(folder.path(), &file, &to_json(config, "llama"));
            let error = read_head(folder.path()).unwrap_err().to_string();
            assert!(error.contains("model.safetensors") && error.contains(wanted), "{error}");
        };
        fn find<'a>(file: &'a mut [Raw], name: &str) -> &'a mut Raw {
            file.iter_mut().find(|raw| raw.0 == name).unwrap()
        }
        says(&|f| f.retain(|raw| raw.0 != "norm.weight"), &config, "no tensor `norm.weight`");
        says(&|f| f.retain(|raw| raw.0 != "lm_head.weight"), &config, "engines then share the target's head");
        says(&|f| f.retain(|raw| raw.0 != "d2t"), &config, "no tensor `d2t`");
        says(&|f| find(f, "fc.weight").0 = "fd.weight".into(), &config, "unknown tensor `fd.weight`");
        says(&|_| (), &DraftConfig { intermediate_size: 7, ..config.clone() }, "has shape");
        says(&|_| (), &DraftConfig { draft_vocab_size: 11, ..config.clone() }, "config.json says [11");
        says(&|f| find(f, "norm.weight").3[3] = 0xff, &config, "not finite");
        says(&|f| find(f, "norm.weight").1 = Dtype::I32, &config, "has type I32");
        says(&|f| find(f, "d2t").1 = Dtype::F64, &config, "`d2t` has type F64");
        says(&|f| find(f, "d2t").3[7] = 0x7f, &config, "which is no token of the target");
        says(&|f| find(f, "d2t").3.fill(0xff), &config, "which is no token of the target");
        let twice = |f: &mut Vec<Raw>| {
            let mut second = find(f, "midlayer.hidden_norm.weight").clone();
            second.0 = "layers.0.hidden_norm.weight".into();
            f.push(second);
        };
        says(&twice, &config, "is there twice");

        // Files that are no head at all.
        let path = |name: &str| folder.path().join(name);
        let fails = |wanted: &str| {
            let error = read_head(folder.path()).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        };
        write(folder.path(), &raw(10), &json);
        std::fs::write(path("model.safetensors"), []).unwrap();
        fails("torn");
        std::fs::write(path("model.safetensors"), [0xff; 64]).unwrap();
        fails("torn");
        std::fs::remove_file(path("model.safetensors")).unwrap();
        fails("model.safetensors");
        std::fs::write(path("model.safetensors.index.json"), "{}").unwrap();
        fails("shards");
        std::fs::write(path("pytorch_model.bin"), "pickle").unwrap();
        fails("pickle");
        std::fs::write(path("config.json"), "{\"hidden_size\": ").unwrap();
        fails("config.json: not JSON");
        std::fs::write(path("config.json"), "[".repeat(100_000)).unwrap();
        fails("config.json: not JSON");
        std::fs::write(path("config.json"), [0xff, 0xfe]).unwrap();
        fails("config.json");
        std::fs::remove_file(path("config.json")).unwrap();
        fails("config.json");
        let error = read_head(&path("nowhere")).unwrap_err().to_string();
        assert!(error.contains("nowhere"), "{error}");
    }

    static FILE: LazyLock<(DraftConfig, Vec<u8>, String)> = LazyLock::new(|| {
        let (config, ..) = head(10);
        let json = to_json(&config, "llama").to_string();
        (config, serialized(&raw(10)), json)
    });

    proptest! {
        #[test]
        fn damaged_weights_are_an_error_or_a_whole_head(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            keep in any::<prop::sample::Index>(),
            truncated in any::<bool>(),
        ) {
            let (config, good, _) = &*FILE;
            let mut bytes = good.clone();
            for (at, byte) in &changes {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            if truncated {
                bytes.truncate(keep.index(good.len()));
            }
            if let Ok(parts) = parse(&bytes, config) {
                prop_assert!(!truncated);
                prop_assert_eq!(parts.vocab.len(), 10);
                for (name, shape) in config.tensor_shapes() {
                    prop_assert_eq!(&parts.tensors[&name].shape, &shape);
                    prop_assert!(parts.tensors[&name].data.iter().all(|x| x.is_finite()));
                }
            }
        }

        #[test]
        fn a_damaged_header_is_an_error_or_a_whole_head(
            changes in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(b"0123456789{}[],:\"FI".to_vec())), 1..4),
        ) {
            // Bytes of the header alone, so that offsets, shapes and types are what changes.
            let (config, good, _) = &*FILE;
            let header = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
            let mut bytes = good.clone();
            for (at, byte) in &changes {
                bytes[8 + at.index(header)] = *byte;
            }
            let _ = parse(&bytes, config);
        }

        #[test]
        fn a_damaged_config_is_an_error_or_a_possible_shape(
            changes in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(b"0123456789-.e{}[],:\"nt".to_vec())), 1..5),
            keep in any::<prop::sample::Index>(),
            truncated in any::<bool>(),
        ) {
            let (_, weights, good) = &*FILE;
            let mut text = good.clone().into_bytes();
            for (at, byte) in &changes {
                let at = at.index(text.len());
                text[at] = *byte;
            }
            if truncated {
                text.truncate(keep.index(good.len()));
            }
            let json = serde_json::from_slice::<Value>(&text).unwrap_or(Value::Null);
            if let Ok(config) = from_json(&json) {
                prop_assert_eq!(config.check(), Ok(()));
                let _ = parse(weights, &config);
            }
        }
    }
}
