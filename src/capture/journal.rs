//! The append-only file of captured sequences.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::{CaptureError, Sequence};

/// Captured sequences on disk, one JSONL line each, written whole and in the order they come.
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens or creates the file. A last line that a kill tore is cut off; the ids of the whole ones are returned.
    ///
    /// # Errors
    /// When a line before the last is not a sequence: then it was not a kill, and nothing is touched.
    pub fn open(path: &Path) -> Result<(Self, HashSet<String>), CaptureError> {
        let mut file =
            OpenOptions::new().read(true).append(true).create(true).open(path).map_err(CaptureError::io(path))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(CaptureError::io(path))?;
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        let mut ids = HashSet::new();
        for (i, line) in bytes[..whole].split(|&b| b == b'\n').enumerate().filter(|(_, line)| !line.is_empty()) {
            let sequence: Sequence = serde_json::from_slice(line).map_err(|e| CaptureError::Journal {
                path: path.to_path_buf(),
                line: i + 1,
                reason: format!("not a captured sequence: {e}"),
            })?;
            ids.insert(sequence.id);
        }
        if whole < bytes.len() {
            tracing::warn!("{}: cut off a torn last line of {} bytes", path.display(), bytes.len() - whole);
            file.set_len(whole as u64).map_err(CaptureError::io(path))?;
            file.seek(SeekFrom::End(0)).map_err(CaptureError::io(path))?;
        }
        Ok((Self { path: path.to_path_buf(), file }, ids))
    }

    /// Appends one sequence.
    ///
    /// # Errors
    /// When the line cannot be written.
    pub fn append(&mut self, sequence: &Sequence) -> Result<(), CaptureError> {
        let mut line = serde_json::to_vec(sequence).map_err(|e| CaptureError::io(&self.path)(e.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(CaptureError::io(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(id: &str) -> Sequence {
        Sequence {
            id: id.into(),
            dataset: "d".into(),
            prompt_ids: vec![1],
            output_ids: vec![2, 3],
            finish_reason: "stop".into(),
            sampling: None,
            segments: vec![],
        }
    }

    #[test]
    fn a_torn_last_line_is_captured_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.jsonl");
        let (mut journal, ids) = Journal::open(&path).unwrap();
        assert!(ids.is_empty());
        journal.append(&sequence("a")).unwrap();
        journal.append(&sequence("b")).unwrap();
        drop(journal);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 5]).unwrap();
        let (mut journal, ids) = Journal::open(&path).unwrap();
        assert_eq!(ids, HashSet::from(["a".to_string()]));
        journal.append(&sequence("b")).unwrap();
        drop(journal);
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }

    #[test]
    fn a_file_that_is_something_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.jsonl");
        std::fs::write(&path, "notes\nmore notes").unwrap();
        assert!(Journal::open(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"notes\nmore notes");
    }
}
