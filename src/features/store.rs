//! The folder of states, keyed by what they depend on.

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use sha2::{Digest, Sha256};

use super::FeaturesError;
use super::file::{self, States};
use crate::recipe::FeaturesRecipe;
use crate::sequences::TrainSequence;
use crate::target::TargetConfig;

/// States on disk: a file's name is a hash of the tokens, the layers, the storage type and the target's weights, so
/// a changed target or recipe never meets stale states.
#[derive(Debug, Clone)]
pub struct FeatureStore {
    folder: PathBuf,
    /// The fused layers, by the index of the layer the stream enters, ascending.
    pub layers: Vec<usize>,
    pub dtype: Dtype,
    hidden: usize,
    fingerprint: String,
}

impl FeatureStore {
    /// A store at `folder` for a target whose weights are named by `fingerprint`.
    ///
    /// # Errors
    /// When the layers do not ascend or the target lacks one.
    pub fn new(
        folder: &Path,
        recipe: &FeaturesRecipe,
        target: &TargetConfig,
        fingerprint: &str,
        layers: Vec<usize>,
    ) -> Result<Self, FeaturesError> {
        let count = target.num_hidden_layers;
        if layers.is_empty() || layers.windows(2).any(|w| w[0] >= w[1]) || layers.last().is_some_and(|&l| l > count) {
            return Err(FeaturesError::Layers { layers, count });
        }
        let dtype = match recipe.dtype.as_str() {
            "f32" => Dtype::F32,
            "f16" => Dtype::F16,
            _ => Dtype::BF16,
        };
        let (hidden, fingerprint) = (target.hidden_size, fingerprint.to_string());
        Ok(Self { folder: folder.to_path_buf(), layers, dtype, hidden, fingerprint })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Slots a token: the fused layers and the last.
    pub fn slots(&self) -> usize {
        self.layers.len() + 1
    }

    /// Bytes that the states of `tokens` take.
    pub fn bytes(&self, tokens: usize) -> u64 {
        let width = if self.dtype == Dtype::F32 { 4 } else { 2 };
        (tokens * self.slots() * self.hidden * width) as u64
    }

    /// Where the states of a sequence lie.
    pub fn path(&self, ids: &[u32]) -> PathBuf {
        let mut hash = Sha256::new();
        hash.update(self.fingerprint.as_bytes());
        hash.update(format!("{:?}{:?}", self.layers, self.dtype).as_bytes());
        ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        let name: String = hash.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        self.folder.join(format!("{name}.safetensors"))
    }

    /// Whether the states of a sequence are there. A file that is torn or of other tokens is not, and is written anew.
    pub fn contains(&self, ids: &[u32]) -> bool {
        let path = self.path(ids);
        path.is_file() && file::read_token_ids(&path).is_ok_and(|found| found == ids)
    }

    /// Reads a sequence's states.
    ///
    /// # Errors
    /// When they are missing, torn, of other tokens or another shape.
    pub fn load(&self, sequence: &TrainSequence) -> Result<States, FeaturesError> {
        let path = self.path(&sequence.ids);
        let states = file::read(&path)?;
        let fail = |reason: String| Err(FeaturesError::File { path: path.clone(), reason });
        if states.token_ids != sequence.ids {
            return fail(format!("its tokens are not those of sequence {}", sequence.id));
        }
        if (states.slots, states.hidden) != (self.slots(), self.hidden) {
            let shape = (states.slots, states.hidden);
            return fail(format!(
                "[T, {}, {}] states where [T, {}, {}] are due",
                shape.0,
                shape.1,
                self.slots(),
                self.hidden
            ));
        }
        Ok(states)
    }

    /// Writes a sequence's states.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, states: &States) -> Result<(), FeaturesError> {
        file::write(&self.path(&states.token_ids), states, self.dtype)
    }
}
