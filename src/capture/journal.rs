//! The files of a capture: append-only, whole lines, torn tails cut off.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::prompts::is_held_out;
use super::{CaptureError, Sequence};

/// A JSONL file that is only ever appended to. Each line is written in one go as it comes, so a kill tears at most the
/// last, and the next run cuts that off.
pub struct Lines {
    path: PathBuf,
    file: File,
}

impl Lines {
    /// Opens or creates the file, hands every whole line to `each`, cuts off a torn last one, and keeps other processes
    /// out until it is dropped.
    ///
    /// # Errors
    /// When another process has it open, or a line before the last is none: then it was not a kill, and nothing is
    /// touched.
    pub fn open<T: DeserializeOwned>(path: &Path, mut each: impl FnMut(T)) -> Result<Self, CaptureError> {
        let io = |e| CaptureError::io(path)(e);
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(CaptureError::Locked { path: path.to_path_buf() }),
            Err(TryLockError::Error(e)) => tracing::debug!("{}: cannot be locked: {e}", path.display()),
        }
        let whole = read_lines(path, &mut each)?;
        let length = file.metadata().map_err(io)?.len();
        if whole < length {
            tracing::warn!("{}: cut off a torn last line of {} bytes", path.display(), length - whole);
            file.set_len(whole).map_err(io)?;
            file.seek(SeekFrom::End(0)).map_err(io)?;
        }
        Ok(Self { path: path.to_path_buf(), file })
    }

    /// Appends one line.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn append<T: Serialize>(&mut self, value: &T) -> Result<(), CaptureError> {
        let mut line = serde_json::to_vec(value).map_err(|e| CaptureError::io(&self.path)(e.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(CaptureError::io(&self.path))
    }
}

/// Hands every whole line of a file to `each`; returns how many bytes they are.
///
/// # Errors
/// When the file cannot be read, or a whole line is not of the kind.
pub fn read_lines<T: DeserializeOwned>(path: &Path, each: &mut impl FnMut(T)) -> Result<u64, CaptureError> {
    let mut lines = BufReader::new(File::open(path).map_err(CaptureError::io(path))?);
    let (mut line, mut number, mut whole) = (Vec::new(), 0, 0);
    loop {
        line.clear();
        let read = lines.read_until(b'\n', &mut line).map_err(CaptureError::io(path))?;
        if !line.ends_with(b"\n") {
            return Ok(whole);
        }
        number += 1;
        whole += read as u64;
        if line.len() > 1 {
            let value = serde_json::from_slice(&line).map_err(|e| CaptureError::Journal {
                path: path.to_path_buf(),
                line: number,
                reason: format!("not a line of a capture: {e}"),
            })?;
            each(value);
        }
    }
}

/// A request that gave no answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failed {
    pub id: String,
    pub dataset: String,
    /// What the server said, or what went wrong.
    pub reason: String,
    /// Times it was asked.
    pub tries: usize,
    /// The next run asks it again: the failure may have passed.
    pub again: bool,
}

/// The captured answers, and those that could not be had.
pub struct Journal {
    answers: Lines,
    failures: Lines,
}

/// What an earlier run left.
#[derive(Debug, Default)]
pub struct Before {
    /// Ids that are answered.
    pub answered: HashSet<String>,
    /// Ids that no server will take, which are not asked again.
    pub failed: HashSet<String>,
}

impl Journal {
    /// Opens journal.jsonl and failed.jsonl in a folder. `each` sees every answer from before.
    ///
    /// # Errors
    /// As [`Lines::open`].
    pub fn open(folder: &Path, mut each: impl FnMut(&Sequence)) -> Result<(Self, Before), CaptureError> {
        std::fs::create_dir_all(folder).map_err(CaptureError::io(folder))?;
        let mut before = Before::default();
        let answers = Lines::open(&folder.join("journal.jsonl"), |sequence: Sequence| {
            each(&sequence);
            before.answered.insert(sequence.id);
        })?;
        let mut failed = HashMap::new();
        let failures = Lines::open(&folder.join("failed.jsonl"), |f: Failed| {
            failed.insert(f.id, f.again);
        })?;
        before.failed.extend(failed.into_iter().filter(|(_, again)| !again).map(|(id, _)| id));
        Ok((Self { answers, failures }, before))
    }

    /// Keeps an answer.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn answer(&mut self, sequence: &Sequence) -> Result<(), CaptureError> {
        self.answers.append(sequence)
    }

    /// Keeps a failure.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn failure(&mut self, failed: &Failed) -> Result<(), CaptureError> {
        self.failures.append(failed)
    }
}

/// Answers in the files that [`split`] writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    pub train: usize,
    pub held_out: usize,
    pub looped: usize,
}

/// Makes train.jsonl, held_out.jsonl and looped.jsonl from the journal, each written beside and renamed. A prompt is
/// held out by a hash of its id, and with its first sample alone: one answer is enough to measure on. What `is_loop`
/// marks is kept apart: neither trained on nor measured on.
///
/// # Errors
/// When the journal cannot be read or a file cannot be written.
pub fn split(folder: &Path, share: f64, is_loop: impl Fn(&[u32]) -> bool) -> Result<Split, CaptureError> {
    let names = ["train.jsonl", "held_out.jsonl", "looped.jsonl"];
    let mut counts = [0; 3];
    let create = |name: &str| tempfile::NamedTempFile::new_in(folder).map_err(CaptureError::io(folder.join(name)));
    let mut files = [create(names[0])?, create(names[1])?, create(names[2])?].map(BufWriter::new);
    let mut failure = None;
    read_lines(&folder.join("journal.jsonl"), &mut |sequence: Sequence| {
        let (prompt, sample) = prompt_of(&sequence.id);
        let held = is_held_out(prompt, share);
        if held && sample > 0 {
            return;
        }
        let to = if is_loop(&sequence.output_ids) { 2 } else { usize::from(held) };
        counts[to] += 1;
        let write = serde_json::to_writer(&mut files[to], &sequence).map_err(std::io::Error::from);
        if let Err(e) = write.and_then(|()| files[to].write_all(b"\n")) {
            failure.get_or_insert(CaptureError::io(folder.join(names[to]))(e));
        }
    })?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    for (file, name) in files.into_iter().zip(names) {
        let path = folder.join(name);
        let file = file.into_inner().map_err(|e| CaptureError::io(&path)(e.into_error()))?;
        let persisted = file.persist(&path).map_err(|e| CaptureError::io(&path)(e.error))?;
        readable(&persisted);
    }
    Ok(Split { train: counts[0], held_out: counts[1], looped: counts[2] })
}

/// A temporary file is its maker's alone; what it is renamed to is as open as any other file.
#[cfg(unix)]
fn readable(file: &File) {
    use std::os::unix::fs::PermissionsExt;
    let _ = file.set_permissions(std::fs::Permissions::from_mode(0o644));
}
#[cfg(not(unix))]
fn readable(_: &File) {}

/// A sequence's prompt and which sample of it it is: `id#2` is the third answer to `id`, `id@1` answers its second turn.
pub fn prompt_of(id: &str) -> (&str, usize) {
    let (rest, sample) = match id.rsplit_once('#') {
        Some((rest, sample)) if !sample.is_empty() && sample.bytes().all(|b| b.is_ascii_digit()) => {
            (rest, sample.parse().unwrap_or(0))
        }
        _ => (id, 0),
    };
    match rest.rsplit_once('@') {
        Some((prompt, turn)) if !turn.is_empty() && turn.bytes().all(|b| b.is_ascii_digit()) => (prompt, sample),
        _ => (rest, sample),
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
            took: None,
        }
    }

    #[test]
    fn a_torn_last_line_is_captured_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        let (mut journal, before) = Journal::open(folder.path(), |_| {}).unwrap();
        assert!(before.answered.is_empty());
        journal.answer(&sequence("a")).unwrap();
        journal.answer(&sequence("b")).unwrap();
        // Another process is kept out.
        assert!(matches!(Journal::open(folder.path(), |_| {}), Err(CaptureError::Locked { .. })));
        drop(journal);
        let bytes = std::fs::read(&path).unwrap();
        for torn in 1..bytes.len() / 2 {
            std::fs::write(&path, &bytes[..bytes.len() - torn]).unwrap();
            let (mut journal, before) = Journal::open(folder.path(), |_| {}).unwrap();
            assert_eq!(before.answered, HashSet::from(["a".to_string()]));
            journal.answer(&sequence("b")).unwrap();
            drop(journal);
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
    }

    #[test]
    fn a_file_that_is_something_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        std::fs::write(&path, "notes\nmore notes").unwrap();
        assert!(Journal::open(folder.path(), |_| {}).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"notes\nmore notes");
    }

    #[test]
    fn failures_that_may_pass_are_asked_again() {
        let folder = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(folder.path(), |_| {}).unwrap();
        let failed =
            |id: &str, again| Failed { id: id.into(), dataset: "d".into(), reason: "r".into(), tries: 1, again };
        journal.failure(&failed("never", false)).unwrap();
        journal.failure(&failed("later", true)).unwrap();
        drop(journal);
        let (_, before) = Journal::open(folder.path(), |_| {}).unwrap();
        assert_eq!(before.failed, HashSet::from(["never".to_string()]));
    }

    #[test]
    fn the_split_keeps_every_answer_once() {
        let folder = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(folder.path(), |_| {}).unwrap();
        for i in 0..200 {
            journal.answer(&sequence(&format!("p{i}"))).unwrap();
        }
        let held: String = (0..200).map(|i| format!("p{i}")).find(|id| is_held_out(id, 0.1)).unwrap();
        journal.answer(&sequence(&format!("{held}#1"))).unwrap();
        journal.answer(&Sequence { output_ids: vec![9; 9], ..sequence("loop") }).unwrap();
        let split = split(folder.path(), 0.1, |ids| ids.len() == 9).unwrap();
        assert_eq!((split.train + split.held_out, split.looped), (200, 1));
        assert!((8..40).contains(&split.held_out));
        assert_eq!(prompt_of("a#b@1#2"), ("a#b", 2));
        assert_eq!(prompt_of("user@host"), ("user@host", 0));
    }
}
