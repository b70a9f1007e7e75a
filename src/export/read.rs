//! Reads a head's folder: ours, the EAGLE authors' or speculators'.

use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use super::ExportError;
use super::config_json::from_json;
use crate::draft::config::DraftConfig;
use crate::draft::head::{HeadTensors, HostArray};
use crate::draft::vocab::DraftVocab;
use crate::target::weights::floats;

/// A head from disk.
#[derive(Debug, Clone)]
pub struct ReadHead {
    pub config: DraftConfig,
    pub vocab: DraftVocab,
    pub tensors: HeadTensors,
}

/// Reads config.json and model.safetensors. Weights are named `midlayer.*` or `layers.0.*`; embeddings and verifier
/// weights that other trainers leave in the file are passed over, since the target's own are used.
///
/// # Errors
/// When a file is missing or torn, or a weight is missing, unknown, of another shape or not finite.
pub fn read_head(folder: &Path) -> Result<ReadHead, ExportError> {
    let config_path = folder.join("config.json");
    let fail = |path: &Path, reason: String| ExportError::File { path: path.to_path_buf(), reason };
    let text = std::fs::read_to_string(&config_path)
        .map_err(|source| ExportError::Io { path: config_path.clone(), source })?;
    let json = serde_json::from_str(&text).map_err(|e| fail(&config_path, format!("not JSON: {e}")))?;
    let config = from_json(&json).map_err(|reason| fail(&config_path, reason))?;
    let path = folder.join("model.safetensors");
    if !path.exists() && folder.join("pytorch_model.bin").exists() {
        return Err(fail(&path, "is not there; pytorch_model.bin is a pickle, convert it to safetensors first".into()));
    }
    let bytes = std::fs::read(&path).map_err(|source| ExportError::Io { path: path.clone(), source })?;
    let (vocab, tensors) = parse(&bytes, &config).map_err(|reason| fail(&path, reason))?;
    Ok(ReadHead { config, vocab, tensors })
}

fn parse(bytes: &[u8], config: &DraftConfig) -> Result<(DraftVocab, HeadTensors), String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| format!("torn: {e}"))?;
    let shapes = config.tensor_shapes();
    let mut tensors = HeadTensors::new();
    let mut vocab = None;
    for (name, view) in file.tensors() {
        let ours = name.strip_prefix("layers.0.").map_or(name.clone(), |rest| format!("midlayer.{rest}"));
        match ours.as_str() {
            "embed_tokens.weight" | "verifier_norm.weight" | "verifier_lm_head.weight" | "t2d" => continue,
            "d2t" => {
                if view.dtype() != Dtype::I64 || view.shape() != [config.draft_vocab_size] {
                    return Err(format!("`d2t` is {:?} {:?}, not I64 [{}]", view.dtype(), view.shape(), config.draft_vocab_size));
                }
                let offsets: Vec<i64> =
                    view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default())).collect();
                vocab = Some(DraftVocab::from_d2t(&offsets, config.vocab_size).map_err(|e| e.to_string())?);
                continue;
            }
            _ => {}
        }
        let Some(shape) = shapes.get(&ours) else {
            return Err(format!("unknown tensor `{name}`"));
        };
        if view.shape() != shape {
            return Err(format!("`{name}` has shape {:?}, config.json says {shape:?}", view.shape()));
        }
        let data = floats(view.dtype(), view.data()).ok_or_else(|| format!("`{name}` has type {:?}", view.dtype()))?;
        if data.iter().any(|x| !x.is_finite()) {
            return Err(format!("`{name}` holds a value that is not finite"));
        }
        tensors.insert(ours, HostArray { shape: shape.clone(), data });
    }
    if let Some(name) = shapes.keys().find(|name| !tensors.contains_key(*name)) {
        return Err(format!("no tensor `{name}`"));
    }
    let vocab = match vocab {
        Some(vocab) => vocab,
        None if config.draft_vocab_size == config.vocab_size => DraftVocab::whole(config.vocab_size),
        None => return Err("no tensor `d2t`, though the draft vocabulary is a part of the target's".into()),
    };
    Ok((vocab, tensors))
}

#[cfg(test)]
mod tests {
    use super::super::config_json::to_json;
    use super::super::write_head;
    use super::*;
    use crate::target::{Rope, RopeScaling};
    use proptest::prelude::*;

    fn head(draft_vocab: usize) -> (DraftConfig, DraftVocab, HeadTensors) {
        let config = DraftConfig {
            hidden_size: 8,
            target_hidden_size: 8,
            intermediate_size: 6,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim: 4,
            rope: Rope { theta: 1e4, scaling: RopeScaling::None },
            vocab_size: 20,
            draft_vocab_size: draft_vocab,
            aux_layers: vec![1, 2, 3],
            ..DraftConfig::default()
        };
        let ids: Vec<u32> = vec![19; 3];
        let (vocab, _) = DraftVocab::count([(&ids[..], &[true; 3][..])].into_iter(), draft_vocab, 20, &[]).unwrap();
        let tensors = config
            .tensor_shapes()
            .into_iter()
            .map(|(name, shape)| {
                let size: usize = shape.iter().product();
                (name, HostArray { shape, data: (0..size).map(|i| i as f32 * 0.3 - 1.0).collect() })
            })
            .collect();
        (config, vocab, tensors)
    }

    #[test]
    fn a_written_head_is_read_back() {
        for draft_vocab in [10, 20] {
            let (config, vocab, tensors) = head(draft_vocab);
            let folder = tempfile::tempdir().unwrap();
            let place = folder.path().join("head");
            for _ in 0..2 {
                write_head(&place, &config, &vocab, &tensors, "llama", &["vllm".into()]).unwrap();
            }
            let read = read_head(&place).unwrap();
            assert_eq!((&read.config, &read.vocab), (&config, &vocab));
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
            assert_eq!(read.tensors["norm.weight"].data[0], half::bf16::from_f32(-1.0).to_f32());
        }
    }

    #[test]
    fn nothing_is_written_of_a_broken_head() {
        let (config, vocab, good) = head(10);
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("head");
        let mut bad = good.clone();
        bad.get_mut("fc.weight").unwrap().data[3] = f32::NAN;
        let error = write_head(&place, &config, &vocab, &bad, "llama", &[]).unwrap_err().to_string();
        assert!(error.contains("fc.weight"), "{error}");
        let mut bad = good.clone();
        bad.remove("norm.weight");
        assert!(write_head(&place, &config, &vocab, &bad, "llama", &[]).is_err());
        assert!(!place.exists());
    }

    fn write_raw(folder: &Path, config: &DraftConfig, rename: impl Fn(&str) -> Option<String>) {
        let (_, vocab, tensors) = head(10);
        let d2t: Vec<u8> = vocab.d2t().iter().flat_map(|x| x.to_le_bytes()).collect();
        let data: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
            .iter()
            .filter_map(|(name, array)| {
                let bytes = array.data.iter().flat_map(|x| x.to_le_bytes()).collect();
                Some((rename(name)?, array.shape.clone(), bytes))
            })
            .collect();
        let mut views: Vec<(&str, safetensors::tensor::TensorView)> = data
            .iter()
            .map(|(n, s, b)| (n.as_str(), safetensors::tensor::TensorView::new(Dtype::F32, s.clone(), b).unwrap()))
            .collect();
        if rename("d2t").is_some() {
            views.push(("d2t", safetensors::tensor::TensorView::new(Dtype::I64, vec![10], &d2t).unwrap()));
        }
        let embed = vec![0u8; 16];
        views.push(("embed_tokens.weight", safetensors::tensor::TensorView::new(Dtype::F32, vec![2, 2], &embed).unwrap()));
        std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        std::fs::write(folder.join("config.json"), to_json(config, "llama").to_string()).unwrap();
    }

    #[test]
    fn foreign_names_are_read_and_wrong_files_are_named() {
        let (config, vocab, tensors) = head(10);
        let folder = tempfile::tempdir().unwrap();
        write_raw(folder.path(), &config, |name| Some(name.replace("midlayer.", "layers.0.")));
        let read = read_head(folder.path()).unwrap();
        assert_eq!((read.vocab, &read.tensors), (vocab, &tensors));

        let says = |rename: &dyn Fn(&str) -> Option<String>, config: &DraftConfig, wanted: &str| {
            write_raw(folder.path(), config, rename);
            let error = read_head(folder.path()).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        };
        let same = |name: &str| Some(name.to_string());
        says(&|name| (name != "norm.weight").then(|| name.to_string()), &config, "no tensor `norm.weight`");
        says(&|name| (name != "d2t").then(|| name.to_string()), &config, "d2t");
        says(&|name| Some(name.replace("fc.weight", "fd.weight")), &config, "unknown tensor `fd.weight`");
        says(&same, &DraftConfig { intermediate_size: 7, ..config.clone() }, "has shape");
        std::fs::write(folder.path().join("config.json"), "{").unwrap();
        assert!(read_head(folder.path()).unwrap_err().to_string().contains("config.json"));
    }

    proptest! {
        #[test]
        fn mutated_heads_never_panic(at in 0usize..6000, byte in any::<u8>(), keep in 0usize..6000) {
            let (config, _, _) = head(10);
            let folder = tempfile::tempdir().unwrap();
            write_raw(folder.path(), &config, |name| Some(name.to_string()));
            let mut bytes = std::fs::read(folder.path().join("model.safetensors")).unwrap();
            let length = bytes.len();
            bytes[at % length] = byte;
            let _ = parse(&bytes, &config);
            let _ = parse(&bytes[..keep % length], &config);
        }
    }
}
