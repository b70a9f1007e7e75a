//! One sequence's hidden states: `hidden_states` `[T, L, H]` and `token_ids` `[T]` in a safetensors file, slots in
//! ascending layer order, the last slot the stream after the last layer before the final norm (vLLM 0.32's
//! ExampleHiddenStatesConnector).

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::FeaturesError;
use crate::target::weights::floats;

/// The states of one sequence, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct States {
    pub token_ids: Vec<u32>,
    /// Slots a token, the last layer's among them.
    pub slots: usize,
    /// Width of a slot.
    pub hidden: usize,
    /// `[T, slots, hidden]`.
    pub data: Vec<f32>,
}

impl States {
    /// Splits the fused layers, `[T, (slots - 1) * hidden]`, from the last slot, `[T, hidden]`.
    pub fn split(&self) -> (Vec<f32>, Vec<f32>) {
        let (width, aux) = (self.slots * self.hidden, (self.slots - 1) * self.hidden);
        let rows = || self.data.chunks_exact(width);
        (rows().flat_map(|row| &row[..aux]).copied().collect(), rows().flat_map(|row| &row[aux..]).copied().collect())
    }
}

/// Writes a file beside its place and renames it there.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: &Path, states: &States, dtype: Dtype) -> Result<(), FeaturesError> {
    let io = |source| FeaturesError::Io { path: path.to_path_buf(), source };
    let bytes: Vec<u8> = match dtype {
        Dtype::F32 => states.data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::F16 => states.data.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
        _ => states.data.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
    };
    let dtype = if matches!(dtype, Dtype::F32 | Dtype::F16) { dtype } else { Dtype::BF16 };
    let ids: Vec<u8> = states.token_ids.iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
    let tokens = states.token_ids.len();
    let file = |e: safetensors::SafeTensorError| io(std::io::Error::other(e.to_string()));
    let views = [
        ("hidden_states", TensorView::new(dtype, vec![tokens, states.slots, states.hidden], &bytes).map_err(file)?),
        ("token_ids", TensorView::new(Dtype::I64, vec![tokens], &ids).map_err(file)?),
    ];
    let whole = safetensors::serialize(views, None).map_err(file)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut temporary = tempfile::NamedTempFile::new_in(folder).map_err(io)?;
    std::io::Write::write_all(temporary.as_file_mut(), &whole).map_err(io)?;
    temporary.persist(path).map_err(|e| io(e.error))?;
    Ok(())
}

/// Reads a file, whoever wrote it.
///
/// # Errors
/// When it is torn, of another layout, or holds values that are not finite.
pub fn read(path: &Path) -> Result<States, FeaturesError> {
    let io = |source| FeaturesError::Io { path: path.to_path_buf(), source };
    let file = File::open(path).map_err(io)?;
    // SAFETY: the map is read once and dropped; see `target::weights`.
    let map = unsafe { Mmap::map(&file) }.map_err(io)?;
    parse(&map).map_err(|reason| FeaturesError::File { path: path.to_path_buf(), reason })
}

/// Reads only the token ids: enough to know whose states a file holds.
///
/// # Errors
/// As [`read`], but for the values.
pub fn read_token_ids(path: &Path) -> Result<Vec<u32>, FeaturesError> {
    let io = |source| FeaturesError::Io { path: path.to_path_buf(), source };
    let file = File::open(path).map_err(io)?;
    // SAFETY: as in `read`.
    let map = unsafe { Mmap::map(&file) }.map_err(io)?;
    let fail = |reason: String| FeaturesError::File { path: path.to_path_buf(), reason };
    token_ids(&SafeTensors::deserialize(&map).map_err(|e| fail(format!("torn: {e}")))?).map_err(fail)
}

fn token_ids(file: &SafeTensors) -> Result<Vec<u32>, String> {
    let ids = file.tensor("token_ids").map_err(|_| "no tensor `token_ids`")?;
    if ids.dtype() != Dtype::I64 || ids.shape().len() != 1 {
        return Err(format!("`token_ids` is {:?} {:?}, not I64 [T]", ids.dtype(), ids.shape()));
    }
    let one = |b: &[u8]| b.try_into().ok().map(i64::from_le_bytes).and_then(|id| u32::try_from(id).ok());
    ids.data().chunks_exact(8).map(|b| one(b).ok_or_else(|| "a negative or huge token id".to_string())).collect()
}

fn parse(bytes: &[u8]) -> Result<States, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| format!("torn: {e}"))?;
    let token_ids = token_ids(&file)?;
    let states = file.tensor("hidden_states").map_err(|_| "no tensor `hidden_states`")?;
    let &[tokens, slots, hidden] = states.shape() else {
        return Err(format!("`hidden_states` has shape {:?}, not [T, L, H]", states.shape()));
    };
    if tokens != token_ids.len() {
        return Err(format!("{tokens} states for {} tokens", token_ids.len()));
    }
    if slots < 2 || hidden == 0 {
        return Err(format!(
            "`hidden_states` has shape {:?}: a fused layer and the last are the least",
            states.shape()
        ));
    }
    let data =
        floats(states.dtype(), states.data()).ok_or_else(|| format!("`hidden_states` in {:?}", states.dtype()))?;
    if let Some(at) = data.iter().position(|x| !x.is_finite()) {
        let (token, slot) = (at / (slots * hidden), at / hidden % slots);
        return Err(format!("a value that is not finite at token {token}, slot {slot}"));
    }
    Ok(States { token_ids, slots, hidden, data })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn states() -> States {
        let data = (0..3 * 2 * 4).map(|i| i as f32).collect();
        States { token_ids: vec![5, 6, 7], slots: 2, hidden: 4, data }
    }

    fn written(dtype: Dtype) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        write(&path, &states(), dtype).unwrap();
        (folder, path)
    }

    #[test]
    fn what_is_written_is_read() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let (_folder, path) = written(dtype);
            assert_eq!(read(&path).unwrap(), states());
            assert_eq!(read_token_ids(&path).unwrap(), [5, 6, 7]);
        }
        let (aux, last) = states().split();
        assert_eq!(aux, [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0, 16.0, 17.0, 18.0, 19.0]);
        assert_eq!(last[..4], [4.0, 5.0, 6.0, 7.0]);
    }

    #[test]
    fn a_torn_or_poisoned_file_is_named() {
        let (_folder, path) = written(Dtype::F32);
        let mut bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 7]).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("torn"));
        let first = bytes.len() - 3 * 8 - 3 * 2 * 4 * 4;
        let nan = |bytes: &mut Vec<u8>, at: usize| bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        // Whichever tensor lies first, this float is a state of token 2.
        let at = (first..bytes.len() - 4).rev().find(|&at| bytes[at..at + 4] == 20f32.to_le_bytes()).unwrap();
        nan(&mut bytes, at);
        std::fs::write(&path, &bytes).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("token 2, slot 1"), "{error}");
    }

    proptest! {
        #[test]
        fn mutated_files_never_panic(at in 0usize..400, byte in any::<u8>()) {
            let (_folder, path) = written(Dtype::BF16);
            let mut bytes = std::fs::read(&path).unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = parse(&bytes);
        }
    }
}
