//! Checkpoints: weights, moments and position in full precision, so that going on gives the same bits.
//!
//! `checkpoints/step-000120/` holds `weights.safetensors`, `optimizer.safetensors` (`m/NAME`, `v/NAME`) and
//! `state.json`. A checkpoint is written into a folder beside and renamed when it is whole; a half-written one is
//! never seen. The order of documents and the learning rate are functions of the step ([`super::pack`],
//! [`super::schedule`]), and nothing in the loop draws random numbers, so the step is all the state they have.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use super::optimizer::AdamW;
use crate::draft::config::DraftConfig;
use crate::draft::head::{DraftHead, HeadError};
use crate::draft::head::{HeadTensors, HostArray};
use crate::recipe::Recipe;

/// Why a checkpoint cannot be written or continued.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot write or read the checkpoint {path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("the checkpoint file {path} is damaged: {reason}; delete its folder to go on from the one before")]
    Damaged { path: PathBuf, reason: String },
    #[error("the checkpoint {path} does not hold this head: {source}")]
    Head { path: PathBuf, source: HeadError },
    #[error(
        "the recipe differs from that of the checkpoint {path}:\n{}\nput it back, or train into another folder (train.out)",
        differences.join("\n")
    )]
    Recipe { path: PathBuf, differences: Vec<String> },
    #[error("the training sequences are not those of the checkpoint {path}; train into another folder (train.out)")]
    Data { path: PathBuf },
}

/// Where a run stands.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct State {
    /// Optimizer steps taken.
    pub step: usize,
    /// Tokens fed, prompts included.
    pub tokens: usize,
    /// The best held-out acceptance length so far and the step that reached it.
    pub best: Option<(f64, usize)>,
    /// A hash of the training sequences and the draft vocabulary.
    pub data: String,
    /// The resolved recipe.
    pub recipe: Recipe,
}

/// The checkpoints of a run folder.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// A run as it was saved.
pub struct Saved {
    pub path: PathBuf,
    pub head: DraftHead,
    pub optimizer: AdamW,
    pub state: State,
}

/// Keys that may change between a run and its continuation: they do not touch what the weights become.
/// Where files lie is among them: what they hold is checked by a hash.
const FREE: [&str; 15] = [
    "target.path",
    "target.hub",
    "target.pip",
    "data.train",
    "train.out",
    "capture",
    "export",
    "evaluate",
    "data.held_out",
    "data.max_held_out_tokens",
    "features.batch_tokens",
    "features.cache",
    "train.evaluate_every",
    "train.checkpoint_every",
    "train.keep",
];

impl Checkpoints {
    /// The checkpoints under `run`, which need not exist yet.
    pub fn new(run: &Path) -> Self {
        Self { folder: run.join("checkpoints") }
    }

    /// Whole checkpoints, oldest first, as `(step, folder)`.
    pub fn list(&self) -> Vec<(usize, PathBuf)> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        let mut found: Vec<_> = entries
            .flatten()
            .filter_map(|entry| {
                let step = entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?;
                Some((step, entry.path()))
            })
            .collect();
        found.sort();
        found
    }

    /// The newest checkpoint's folder.
    pub fn newest(&self) -> Option<PathBuf> {
        self.list().pop().map(|(_, path)| path)
    }

    /// The folder of the checkpoint at `step`.
    pub fn at(&self, step: usize) -> PathBuf {
        self.folder.join(format!("step-{step:06}"))
    }

    /// Writes a checkpoint and removes all but the newest `keep` and the best.
    ///
    /// # Errors
    /// When a file cannot be written; what was there before stays.
    pub fn save(
        &self,
        head: &DraftHead,
        optimizer: &AdamW,
        state: &State,
        keep: usize,
    ) -> Result<PathBuf, CheckpointError> {
        let path = self.at(state.step);
        let beside = self.folder.join(format!("writing-{:06}", state.step));
        let io = |source| CheckpointError::Io { path: path.clone(), source };
        if beside.exists() {
            fs::remove_dir_all(&beside).map_err(io)?;
        }
        fs::create_dir_all(&beside).map_err(io)?;
        let weights: Vec<_> = head.weights().iter().map(|(name, weight)| (name.clone(), weight)).collect();
        write_tensors(&beside.join("weights.safetensors"), weights)?;
        let moments = optimizer.moments.iter();
        let moments = moments.flat_map(|(name, (m, v))| [(format!("m/{name}"), m), (format!("v/{name}"), v)]).collect();
        write_tensors(&beside.join("optimizer.safetensors"), moments)?;
        let json = serde_json::to_string_pretty(state).map_err(|e| io(e.into()))?;
        write_synced(&beside.join("state.json"), json.as_bytes()).map_err(io)?;
        if path.exists() {
            // The same step of the same run has the same bits; only what was learnt about it can be newer.
            fs::rename(beside.join("state.json"), path.join("state.json")).map_err(io)?;
            fs::remove_dir_all(&beside).map_err(io)?;
        } else {
            fs::rename(&beside, &path).map_err(io)?;
        }
        fs::File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(io)?;

        let best = state.best.map(|(_, step)| step);
        let all = self.list();
        let old = all.len().saturating_sub(keep.max(1));
        for (step, folder) in &all[..old] {
            if Some(*step) != best {
                fs::remove_dir_all(folder).map_err(io)?;
            }
        }
        Ok(path)
    }

    /// Reads the checkpoint in `path`.
    ///
    /// # Errors
    /// When it is damaged, or when it holds another head than `config` describes.
    pub fn load(path: &Path, config: &DraftConfig, device: &Device) -> Result<Saved, CheckpointError> {
        let state_path = path.join("state.json");
        let text = fs::read_to_string(&state_path)
            .map_err(|source| CheckpointError::Io { path: state_path.clone(), source })?;
        let state: State = serde_json::from_str(&text)
            .map_err(|e| CheckpointError::Damaged { path: state_path, reason: e.to_string() })?;
        let shapes = config.tensor_shapes();
        let weights: HeadTensors = read_tensors(&path.join("weights.safetensors"))?
            .into_iter()
            .map(|(name, (rank2, data))| {
                let shape = shapes.get(&name).cloned().unwrap_or(rank2);
                (name, HostArray { shape, data })
            })
            .collect();
        let head = DraftHead::from_tensors(config.clone(), &weights, device)
            .map_err(|source| CheckpointError::Head { path: path.to_path_buf(), source })?;
        let moments_path = path.join("optimizer.safetensors");
        let mut halves = BTreeMap::new();
        for (name, (shape, data)) in read_tensors(&moments_path)? {
            let weight = name.get(2..).unwrap_or_default().to_string();
            let known = head.weights().get(&weight).is_some_and(|w| w.dims().to_vec() == shape);
            if !known {
                let reason = format!("`{name}` {shape:?} fits no weight of the head");
                return Err(CheckpointError::Damaged { path: moments_path, reason });
            }
            let tensor = Tensor::<2>::from_data(TensorData::new(data, [shape[0], shape[1]]), device);
            halves.insert(name, tensor);
        }
        let mut optimizer = AdamW { moments: BTreeMap::new(), updates: state.step };
        for name in head.weights().keys() {
            match (halves.remove(&format!("m/{name}")), halves.remove(&format!("v/{name}"))) {
                (Some(m), Some(v)) => {
                    optimizer.moments.insert(name.clone(), (m, v));
                }
                (None, None) => {}
                _ => {
                    let reason = format!("`{name}` has one moment of two");
                    return Err(CheckpointError::Damaged { path: moments_path, reason });
                }
            }
        }
        Ok(Saved { path: path.to_path_buf(), head, optimizer, state })
    }
}

impl Saved {
    /// Checks that going on under `recipe` with the sequences hashed as `data` gives what an undisturbed run would.
    ///
    /// # Errors
    /// With every key that differs, as it was and as it is.
    pub fn accepts(&self, recipe: &Recipe, data: &str) -> Result<(), CheckpointError> {
        let differences = differences(&self.state.recipe, recipe);
        if !differences.is_empty() {
            return Err(CheckpointError::Recipe { path: self.path.clone(), differences });
        }
        if self.state.data != data {
            return Err(CheckpointError::Data { path: self.path.clone() });
        }
        Ok(())
    }
}

/// Every key that matters and differs, one line each.
fn differences(was: &Recipe, is: &Recipe) -> Vec<String> {
    let flat = |recipe: &Recipe| {
        let mut keys = BTreeMap::new();
        flatten("", &serde_json::to_value(recipe).unwrap_or_default(), &mut keys);
        keys
    };
    let (was, is) = (flat(was), flat(is));
    let mut keys: Vec<_> = was.keys().chain(is.keys()).collect();
    keys.sort();
    keys.dedup();
    let free = |key: &str| FREE.iter().any(|f| key == *f || key.starts_with(&format!("{f}.")));
    keys.into_iter()
        .filter(|key| !free(key) && was.get(*key) != is.get(*key))
        .map(|key| {
            let show = |v: Option<&serde_json::Value>| v.map_or("not set".to_string(), ToString::to_string);
            format!("  {key}: {} in the checkpoint, {} now", show(was.get(key)), show(is.get(key)))
        })
        .collect()
}

fn flatten(prefix: &str, value: &serde_json::Value, into: &mut BTreeMap<String, serde_json::Value>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&key, value, into);
            }
        }
        serde_json::Value::Null => {}
        other => {
            into.insert(prefix.to_string(), other.clone());
        }
    }
}

fn write_tensors(path: &Path, tensors: Vec<(String, &Tensor<2>)>) -> Result<(), CheckpointError> {
    let io = |source| CheckpointError::Io { path: path.to_path_buf(), source };
    let host: Vec<_> = tensors
        .into_iter()
        .map(|(name, tensor)| {
            let data: Vec<f32> = tensor.to_data().convert::<f32>().try_to_vec().expect("weights are float tensors");
            (name, tensor.dims(), data)
        })
        .collect();
    let views = host.iter().map(|(name, shape, data)| {
        let view = TensorView::new(Dtype::F32, shape.to_vec(), bytemuck::cast_slice(data));
        (name.clone(), view.expect("the data fills the shape"))
    });
    let bytes = safetensors::serialize(views, None).map_err(|e| io(std::io::Error::other(e)))?;
    write_synced(path, &bytes).map_err(io)
}

fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = fs::File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

type Read = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn read_tensors(path: &Path) -> Result<Read, CheckpointError> {
    let bytes = fs::read(path).map_err(|source| CheckpointError::Io { path: path.to_path_buf(), source })?;
    let damaged = |reason: String| CheckpointError::Damaged { path: path.to_path_buf(), reason };
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| damaged(e.to_string()))?;
    let mut read = BTreeMap::new();
    for (name, view) in tensors.iter() {
        if view.dtype() != Dtype::F32 || view.shape().len() != 2 {
            return Err(damaged(format!("`{name}` is not a float32 matrix")));
        }
        let data = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        read.insert(name.to_string(), (view.shape().to_vec(), data));
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_learning_rate_is_shown_and_a_changed_interval_is_not() {
        let mut was = Recipe::default();
        was.train.lr = 0.25;
        let mut is = was.clone();
        is.train.checkpoint_every += 1;
        assert!(differences(&was, &is).is_empty());
        is.train.lr = 0.5;
        let lines = differences(&was, &is);
        assert_eq!(lines, ["  train.lr: 0.25 in the checkpoint, 0.5 now"]);
    }
}
