//! Writes the served folder and checks it as a reader would.

use std::path::Path;

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::config_json::{check_engines, to_json};
use super::read::read_head;
use super::ExportError;
use crate::draft::config::DraftConfig;
use crate::draft::head::HeadTensors;
use crate::draft::vocab::DraftVocab;

/// Writes `folder` (beside its place, then renamed there): `model.safetensors` in bfloat16 with `d2t` and `t2d`, and
/// config.json for a target of `target_type`. Then reads it back and compares.
///
/// # Errors
/// When an engine cannot honour an option, a weight is not finite or of another shape, the folder cannot be written,
/// or what is read back differs.
pub fn write_head(
    folder: &Path,
    config: &DraftConfig,
    vocab: &DraftVocab,
    tensors: &HeadTensors,
    target_type: &str,
    engines: &[String],
) -> Result<(), ExportError> {
    check_engines(config, engines)?;
    let shapes = config.tensor_shapes();
    let weight = |name: &str, reason: String| ExportError::Weight { name: name.into(), reason };
    if let Some(name) = tensors.keys().find(|name| !shapes.contains_key(*name)) {
        return Err(weight(name, "the head's shape has no such weight".into()));
    }
    let mut bytes: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, shape) in shapes {
        let array = tensors.get(&name).ok_or_else(|| weight(&name, "is missing".into()))?;
        if array.shape != shape {
            return Err(weight(&name, format!("has shape {:?}, not {shape:?}", array.shape)));
        }
        // Rounding to bfloat16 can overflow, so it is the rounded value that must be finite.
        let rounded: Vec<bf16> = array.data.iter().map(|&x| bf16::from_f32(x)).collect();
        if rounded.iter().any(|x| !x.is_finite()) {
            return Err(ExportError::NotFinite { name });
        }
        bytes.push((name, Dtype::BF16, shape, rounded.iter().flat_map(|x| x.to_le_bytes()).collect()));
    }
    // Engines know no d2t where the draft vocabulary is the whole of the target's.
    if vocab.len() < vocab.target_size() {
        let d2t = vocab.d2t().iter().flat_map(|offset| offset.to_le_bytes()).collect();
        let t2d = vocab.t2d().iter().map(|&is_in| u8::from(is_in)).collect();
        bytes.push(("d2t".into(), Dtype::I64, vec![vocab.len()], d2t));
        bytes.push(("t2d".into(), Dtype::BOOL, vec![vocab.target_size()], t2d));
    }
    let io = |source| ExportError::Io { path: folder.to_path_buf(), source };
    let views: Vec<(&str, TensorView)> = bytes
        .iter()
        .map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data).map_err(|e| weight(name, e.to_string()))?;
            Ok((name.as_str(), view))
        })
        .collect::<Result<_, ExportError>>()?;
    let metadata = [("format".to_string(), "pt".to_string())].into();
    let file = safetensors::serialize(views, Some(metadata)).map_err(|e| weight("all", e.to_string()))?;

    let parent = folder.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(io)?;
    let beside = tempfile::tempdir_in(parent).map_err(io)?;
    std::fs::write(beside.path().join("model.safetensors"), file).map_err(io)?;
    let json = serde_json::to_string_pretty(&to_json(config, target_type)).map_err(|e| io(e.into()))?;
    std::fs::write(beside.path().join("config.json"), json + "\n").map_err(io)?;
    check(beside.path(), config, vocab, tensors)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(beside.path(), std::fs::Permissions::from_mode(0o755)).map_err(io)?;
    }
    if folder.exists() {
        std::fs::remove_dir_all(folder).map_err(io)?;
    }
    std::fs::rename(beside.keep(), folder).map_err(io)
}

/// Reads the folder back: no tensor more or less, types and shapes as meant, every value the bfloat16 of ours.
fn check(folder: &Path, config: &DraftConfig, vocab: &DraftVocab, tensors: &HeadTensors) -> Result<(), ExportError> {
    let path = folder.join("model.safetensors");
    let fail = |reason: String| ExportError::File { path: path.clone(), reason: format!("self-check: {reason}") };
    let bytes = std::fs::read(&path).map_err(|source| ExportError::Io { path: path.clone(), source })?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| fail(e.to_string()))?;
    let mut expected = config.tensor_shapes().len();
    if vocab.len() < vocab.target_size() {
        expected += 2;
        let types = ["d2t", "t2d"].map(|name| file.tensor(name).map(|t| t.dtype()).ok());
        if types != [Some(Dtype::I64), Some(Dtype::BOOL)] {
            return Err(fail(format!("d2t and t2d are {types:?}")));
        }
    }
    if file.len() != expected {
        return Err(fail(format!("{} tensors, {expected} are due", file.len())));
    }
    let read = read_head(folder)?;
    if &read.config != config || &read.vocab != vocab {
        return Err(fail("the shape or the draft vocabulary is read back differently".into()));
    }
    for (name, array) in tensors {
        let same = read.tensors[name].data.iter().zip(&array.data).all(|(&a, &b)| a == bf16::from_f32(b).to_f32());
        if !same {
            return Err(fail(format!("`{name}` is read back differently")));
        }
    }
    Ok(())
}
