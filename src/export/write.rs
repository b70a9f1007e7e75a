//! Writes the served folder and checks it as a reader would.

use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::ExportError;
use super::config_json::{same_shape, to_json};
use super::engines::{check_engines, check_target, warnings};
use super::read::read_head;
use crate::draft::config::DraftConfig;
use crate::draft::head::HeadTensors;
use crate::draft::vocab::DraftVocab;

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportReport {
    pub folder: PathBuf,
    /// Tensors in model.safetensors, `d2t` and `t2d` included.
    pub tensors: usize,
    /// Size of model.safetensors.
    pub bytes: usize,
    /// What engines honour only from some version on; see [`warnings`].
    pub warnings: Vec<String>,
}

/// A tensor as the file holds it.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// Writes `folder` (beside its place, then renamed there): `model.safetensors` in bfloat16 with `d2t` and `t2d`, and
/// config.json for a target of `target_type` (its `model_type`). Reads it back and compares before it takes its place.
///
/// An earlier head in `folder` is replaced; other files in it stay.
///
/// # Errors
/// When an engine cannot honour an option, a weight is not finite or of another shape, the folder holds something that
/// is no head, it cannot be written, or what is read back differs. What was there before then stays.
pub fn write_head(
    folder: &Path,
    config: &DraftConfig,
    vocab: &DraftVocab,
    tensors: &HeadTensors,
    target_type: &str,
    engines: &[String],
) -> Result<ExportReport, ExportError> {
    check_engines(config, engines)?;
    check_target(config, target_type, engines)?;
    check_folder(folder)?;
    let stored = stored(config, vocab, tensors)?;
    let io = |source| ExportError::Io { path: folder.to_path_buf(), source };
    let weight = |name: &str, reason: String| ExportError::Weight { name: name.into(), reason };
    let views: Vec<(&str, TensorView)> = stored
        .iter()
        .map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data).map_err(|e| weight(name, e.to_string()))?;
            Ok((name.as_str(), view))
        })
        .collect::<Result<_, ExportError>>()?;
    // transformers refuses a file without it.
    let metadata = [("format".to_string(), "pt".to_string())].into();
    let file = safetensors::serialize(views, Some(metadata)).map_err(|e| io(std::io::Error::other(e)))?;

    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(io)?;
    let beside = tempfile::Builder::new().prefix(".head-").tempdir_in(parent).map_err(io)?;
    write_synced(&beside.path().join("model.safetensors"), &file).map_err(io)?;
    let json = serde_json::to_string_pretty(&to_json(config, target_type)).map_err(|e| io(e.into()))?;
    write_synced(&beside.path().join("config.json"), (json + "\n").as_bytes()).map_err(io)?;
    check(beside.path(), config, vocab, tensors, &stored)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(beside.path(), fs::Permissions::from_mode(0o755)).map_err(io)?;
    }
    put(beside, folder, parent).map_err(io)?;
    Ok(ExportReport {
        folder: folder.to_path_buf(),
        tensors: stored.len(),
        bytes: file.len(),
        warnings: warnings(config, engines),
    })
}

/// Whether [`write_head`] may write `folder`: it is absent, empty, or holds a head.
///
/// # Errors
/// When it holds anything else: a target's folder, say, must not lose its weights to a slip in `export.out`.
pub fn check_folder(folder: &Path) -> Result<(), ExportError> {
    let occupied = |reason: String| Err(ExportError::Occupied { path: folder.to_path_buf(), reason });
    if !folder.exists() {
        return Ok(());
    }
    let mut entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => return occupied(error.to_string()),
    };
    if entries.next().is_none() {
        return Ok(());
    }
    match fs::read_to_string(folder.join("config.json")).map(|text| serde_json::from_str::<Value>(&text)) {
        Ok(Ok(json)) if json.get("draft_vocab_size").is_some() => Ok(()),
        Ok(Ok(_)) => occupied("its config.json has no `draft_vocab_size`".into()),
        Ok(Err(error)) => occupied(format!("its config.json is not JSON: {error}")),
        Err(error) => occupied(format!("config.json: {error}")),
    }
}

/// The file's tensors: weights rounded to bfloat16, then the vocabulary's two maps.
fn stored(config: &DraftConfig, vocab: &DraftVocab, tensors: &HeadTensors) -> Result<Vec<Stored>, ExportError> {
    let weight = |name: &str, reason: String| ExportError::Weight { name: name.into(), reason };
    let shapes = config.tensor_shapes();
    if (vocab.len(), vocab.target_size()) != (config.draft_vocab_size, config.vocab_size) {
        return Err(ExportError::Vocab {
            len: vocab.len(),
            target: vocab.target_size(),
            draft_vocab_size: config.draft_vocab_size,
            vocab_size: config.vocab_size,
        });
    }
    if let Some(name) = tensors.keys().find(|name| !shapes.contains_key(*name)) {
        return Err(weight(name, "the head's shape has no such weight".into()));
    }
    let mut stored: Vec<Stored> = Vec::new();
    for (name, shape) in shapes {
        let array = tensors.get(&name).ok_or_else(|| weight(&name, "is missing".into()))?;
        if array.shape != shape || array.data.len() != shape.iter().product::<usize>() {
            return Err(weight(&name, format!("has shape {:?}, not {shape:?}", array.shape)));
        }
        // Rounding to bfloat16 can overflow, so it is the rounded value that must be finite.
        let rounded: Vec<bf16> = array.data.iter().map(|&x| bf16::from_f32(x)).collect();
        if rounded.iter().any(|x| !x.is_finite()) {
            return Err(ExportError::NotFinite { name });
        }
        stored.push((name, Dtype::BF16, shape, rounded.iter().flat_map(|x| x.to_le_bytes()).collect()));
    }
    // Engines know no d2t where the draft vocabulary is the whole of the target's.
    if vocab.len() < vocab.target_size() {
        let d2t = vocab.d2t().iter().flat_map(|offset| offset.to_le_bytes()).collect();
        let t2d = vocab.t2d().iter().map(|&is_in| u8::from(is_in)).collect();
        stored.push(("d2t".into(), Dtype::I64, vec![vocab.len()], d2t));
        stored.push(("t2d".into(), Dtype::BOOL, vec![vocab.target_size()], t2d));
    }
    Ok(stored)
}

/// Reads the folder back: no tensor more or less, types, shapes and bytes as meant, and a reader's head the same.
fn check(
    folder: &Path,
    config: &DraftConfig,
    vocab: &DraftVocab,
    tensors: &HeadTensors,
    stored: &[Stored],
) -> Result<(), ExportError> {
    let path = folder.join("model.safetensors");
    let fail = |reason: String| ExportError::File { path: path.clone(), reason: format!("self-check: {reason}") };
    let bytes = fs::read(&path).map_err(|source| ExportError::Io { path: path.clone(), source })?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| fail(e.to_string()))?;
    if file.len() != stored.len() {
        return Err(fail(format!("{} tensors, {} are due", file.len(), stored.len())));
    }
    for (name, dtype, shape, data) in stored {
        let view = file.tensor(name).map_err(|e| fail(format!("`{name}`: {e}")))?;
        if (view.dtype(), view.shape()) != (*dtype, &shape[..]) || view.data() != data {
            return Err(fail(format!("`{name}` is read back differently")));
        }
    }
    let read = read_head(folder)?;
    if !same_shape(&read.config, config) || &read.vocab != vocab {
        return Err(fail("the shape or the draft vocabulary is read back differently".into()));
    }
    for (name, array) in tensors {
        let wanted = array.data.iter().map(|&x| bf16::from_f32(x).to_f32());
        let same = read.tensors.get(name).is_some_and(|read| read.data.iter().copied().eq(wanted));
        if !same {
            return Err(fail(format!("`{name}` is read back differently")));
        }
    }
    Ok(())
}

fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = fs::File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Moves the finished folder to its place. A head that is there is first moved aside, so that a crash between the two
/// renames loses neither, and gives its other files to the new one.
fn put(beside: tempfile::TempDir, folder: &Path, parent: &Path) -> std::io::Result<()> {
    if folder.exists() {
        let aside = tempfile::Builder::new().prefix(".head-before-").tempdir_in(parent)?;
        let old = aside.path().join("head");
        fs::rename(folder, &old)?;
        // From here on it holds the only copy of the head that was there.
        let aside = aside.keep();
        if let Err(error) = fs::rename(beside.path(), folder) {
            fs::rename(&old, folder)?;
            let _ = fs::remove_dir(&aside);
            return Err(error);
        }
        for entry in fs::read_dir(&old)? {
            let entry = entry?;
            let place = folder.join(entry.file_name());
            if !place.exists() {
                fs::rename(entry.path(), place)?;
            }
        }
        fs::remove_dir_all(&aside)?;
    } else {
        fs::rename(beside.path(), folder)?;
    }
    // It has moved; nothing is left to remove.
    let _ = beside.keep();
    fs::File::open(parent)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::super::engines::ENGINES;
    use super::super::read::tests::{head, weights};
    use super::*;
    use crate::target::{Rope, RopeScaling};

    fn all() -> Vec<String> {
        ENGINES.map(String::from).to_vec()
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_folder_holds_what_engines_load_and_nothing_else() {
        let (config, vocab, tensors) = head(10);
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("deep/head");
        let report = write_head(&place, &config, &vocab, &tensors, "llama", &all()).unwrap();
        assert_eq!((report.folder.clone(), report.tensors, report.warnings), (place.clone(), 15, vec![]));
        assert_eq!(names(&place), ["config.json", "model.safetensors"]);
        assert_eq!(names(place.parent().unwrap()), ["head"]);
        let bytes = fs::read(place.join("model.safetensors")).unwrap();
        assert_eq!(bytes.len(), report.bytes);
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("midlayer.self_attn.q_proj.weight").unwrap().dtype(), Dtype::BF16);
        assert_eq!((file.tensor("d2t").unwrap().dtype(), file.tensor("d2t").unwrap().shape()), (Dtype::I64, &[10][..]));
        assert_eq!(
            (file.tensor("t2d").unwrap().dtype(), file.tensor("t2d").unwrap().shape()),
            (Dtype::BOOL, &[20][..])
        );

        // Without a reduced vocabulary engines know neither map.
        let (config, vocab, tensors) = head(20);
        let report = write_head(&place, &config, &vocab, &tensors, "llama", &all()).unwrap();
        assert_eq!(report.tensors, 13);
    }

    #[test]
    fn optional_weights_and_their_warnings_are_written() {
        let (config, vocab, _) = head(10);
        let config = DraftConfig { fc_norm: true, norm_output: true, ..config };
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("head");
        let engines = ["vllm".to_string(), "sglang".to_string()];
        let report = write_head(&place, &config, &vocab, &weights(&config), "qwen3", &engines).unwrap();
        assert_eq!((report.tensors, report.warnings.len()), (18, 2));
        assert_eq!(read_head(&place).unwrap().config, config);
        assert!(write_head(&place, &config, &vocab, &weights(&config), "qwen3", &all()).is_err());
    }

    #[test]
    fn floats_that_decimal_text_does_not_keep_do_not_fail_the_check() {
        let (config, vocab, tensors) = head(10);
        let folder = tempfile::tempdir().unwrap();
        for i in 0..20 {
            let eps = f64::from(1e-6f32 + i as f32 * 1.7e-9);
            let scaling = RopeScaling::Linear { factor: 1.0 + f64::from(0.1f32 * i as f32) };
            let config = DraftConfig { rms_norm_eps: eps, rope: Rope { theta: 1e6 / 3.0, scaling }, ..config.clone() };
            write_head(&folder.path().join("head"), &config, &vocab, &tensors, "llama", &all()).unwrap();
        }
    }

    #[test]
    fn nothing_is_written_of_a_broken_head() {
        let (config, vocab, good) = head(10);
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("head");
        let says = |tensors: &HeadTensors, vocab: &DraftVocab, wanted: &str| {
            let error = write_head(&place, &config, vocab, tensors, "llama", &[]).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
            assert!(names(folder.path()).is_empty());
        };
        for value in [f32::NAN, f32::INFINITY, f32::MAX] {
            let mut bad = good.clone();
            bad.get_mut("fc.weight").unwrap().data[3] = value;
            says(&bad, &vocab, "`fc.weight` holds a value that is not finite");
        }
        let mut bad = good.clone();
        bad.remove("norm.weight");
        says(&bad, &vocab, "`norm.weight`: is missing");
        let mut bad = good.clone();
        bad.insert("extra".into(), good["norm.weight"].clone());
        says(&bad, &vocab, "`extra`");
        let mut bad = good.clone();
        bad.get_mut("norm.weight").unwrap().data.pop();
        says(&bad, &vocab, "`norm.weight`: has shape");
        says(&good, &DraftVocab::whole(20), "20 of 20 tokens, the head 10 of 20");
        says(&good, &DraftVocab::from_d2t(&[0; 10], 30).unwrap(), "10 of 30 tokens");
    }

    #[test]
    fn a_head_is_replaced_with_its_neighbours_kept() {
        let (config, vocab, tensors) = head(10);
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("head");
        write_head(&place, &config, &vocab, &tensors, "llama", &[]).unwrap();
        fs::write(place.join("README.md"), "mine").unwrap();
        let (config, vocab, tensors) = head(12);
        write_head(&place, &config, &vocab, &tensors, "llama", &[]).unwrap();
        assert_eq!(read_head(&place).unwrap().config.draft_vocab_size, 12);
        assert_eq!(fs::read_to_string(place.join("README.md")).unwrap(), "mine");
        assert_eq!(names(folder.path()), ["head"]);
        // A head that is refused leaves the one before.
        let mut bad = tensors.clone();
        bad.remove("fc.weight");
        assert!(write_head(&place, &config, &vocab, &bad, "llama", &[]).is_err());
        assert_eq!(read_head(&place).unwrap().vocab, vocab);
    }

    #[test]
    fn a_folder_of_something_else_is_left_alone() {
        let (config, vocab, tensors) = head(10);
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("target");
        fs::create_dir(&place).unwrap();
        check_folder(&place).unwrap();
        fs::write(place.join("notes.txt"), "keep").unwrap();
        let refused = |wanted: &str| {
            let error = write_head(&place, &config, &vocab, &tensors, "llama", &[]).unwrap_err().to_string();
            assert!(error.contains("export.out") && error.contains(wanted), "{error}");
        };
        refused("config.json");
        fs::write(place.join("config.json"), "{\"hidden_size\": 8}").unwrap();
        refused("no `draft_vocab_size`");
        fs::write(place.join("config.json"), "{").unwrap();
        refused("not JSON");
        assert_eq!(names(&place), ["config.json", "notes.txt"]);
        let file = folder.path().join("file");
        fs::write(&file, "keep").unwrap();
        assert!(write_head(&file, &config, &vocab, &tensors, "llama", &[]).is_err());
        assert_eq!(fs::read_to_string(file).unwrap(), "keep");
    }
}
