//! metrics.jsonl: one line an optimizer step, one a held-out evaluation.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use crate::draft::acceptance::ChainCounts;

/// Held-out figures at one moment.
#[derive(Debug, Clone, Serialize)]
pub struct HeldOutFigures {
    /// The objective on the held-out documents.
    pub loss: f64,
    /// Each TTT step's unweighted loss, accuracy (a target token outside the draft vocabulary is a miss), accuracy
    /// given that the earlier steps hit, and the share of chains that hold so far.
    pub step_loss: Vec<f64>,
    pub accuracy: Vec<f64>,
    pub conditional_accuracy: Vec<f64>,
    pub chain_accuracy: Vec<f64>,
    /// Tokens a verification that chains as long as the TTT unroll imply, the bonus token counted.
    pub acceptance_length: f64,
    /// Rows compared at the first step.
    pub rows: usize,
}

impl HeldOutFigures {
    /// From the counts and the unweighted loss sums of each step.
    pub fn new(loss: f64, step_loss: Vec<f64>, counts: &ChainCounts) -> Self {
        Self {
            loss,
            step_loss,
            accuracy: counts.accuracy(),
            conditional_accuracy: counts.conditional_accuracy(),
            chain_accuracy: counts.chain_accuracy(),
            acceptance_length: counts.acceptance_length(counts.rows.len()),
            rows: counts.rows.first().copied().unwrap_or(0),
        }
    }
}

/// The open metrics file.
pub struct Metrics {
    file: fs::File,
}

impl Metrics {
    /// Opens `run/metrics.jsonl` for a run that stands at `step`: lines of later steps, written after the last
    /// checkpoint by a run that was killed, are cut off, as is a torn last line.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn open(run: &Path, step: usize) -> std::io::Result<Self> {
        let path: PathBuf = run.join("metrics.jsonl");
        let kept: String = match fs::read_to_string(&path) {
            Ok(text) => text
                .lines()
                .filter(|line| {
                    let at = serde_json::from_str::<Value>(line).ok().and_then(|v| v["step"].as_u64());
                    at.is_some_and(|at| at <= step as u64)
                })
                .fold(String::new(), |all, line| all + line + "\n"),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e),
        };
        let beside = path.with_extension("jsonl.writing");
        fs::write(&beside, kept)?;
        fs::rename(&beside, &path)?;
        Ok(Self { file: fs::OpenOptions::new().append(true).open(&path)? })
    }

    /// Appends one line.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&mut self, line: &impl Serialize) -> std::io::Result<()> {
        let mut text = serde_json::to_string(line).map_err(std::io::Error::from)?;
        text.push('\n');
        self.file.write_all(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_after_the_resumed_step_and_torn_lines_are_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"ste").unwrap();
        Metrics::open(folder.path(), 2).unwrap().write(&serde_json::json!({"step": 3, "again": true})).unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "{\"step\":1}\n{\"step\":2}\n{\"again\":true,\"step\":3}\n");
    }
}
