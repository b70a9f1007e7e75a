//! Reads prompts.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::CaptureError;
use crate::target::Message;

/// A conversation that waits for its next assistant turn.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// Unique among all files.
    pub id: String,
    /// The kind it is counted under.
    pub dataset: String,
    pub messages: Vec<Message>,
}

impl Prompt {
    /// Whether the prompt is held out, by a hash of its id alone: the same prompt falls on the same side in every
    /// capture, whatever else the files hold.
    pub fn is_held_out(&self, share: f64) -> bool {
        let hash = Sha256::digest(self.id.as_bytes());
        let first = u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]);
        f64::from(first) < share * 2f64.powi(32)
    }
}

/// Reads every prompt of the files, and of the `.jsonl` files of the folders, in order.
///
/// # Errors
/// At the first line that is not a prompt, has an id seen before, or does not end with a turn to answer.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Prompt>, CaptureError> {
    let mut prompts = Vec::new();
    let mut seen = HashSet::new();
    for path in paths {
        for file in files(path)? {
            let text = std::fs::read_to_string(&file).map_err(CaptureError::io(&file))?;
            for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let fail = |reason: String| CaptureError::Prompt { path: file.clone(), line: i + 1, reason };
                let prompt: Prompt = serde_json::from_str(line).map_err(|e| fail(format!("not a prompt: {e}")))?;
                check(&prompt).map_err(&fail)?;
                if !seen.insert(prompt.id.clone()) {
                    return Err(fail(format!("the id `{}` was seen before", prompt.id)));
                }
                prompts.push(prompt);
            }
        }
    }
    Ok(prompts)
}

fn files(path: &Path) -> Result<Vec<PathBuf>, CaptureError> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = std::fs::read_dir(path).map_err(CaptureError::io(path))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|file| file.extension().is_some_and(|e| e == "jsonl"))
        .collect();
    files.sort();
    Ok(files)
}

fn check(prompt: &Prompt) -> Result<(), String> {
    match prompt.messages.last() {
        None => return Err("no messages".into()),
        Some(last) if last.role == "assistant" => {
            return Err("the last turn is the assistant's; nothing to answer".into());
        }
        Some(_) => {}
    }
    let known = |role: &str| matches!(role, "system" | "user" | "assistant" | "tool");
    match prompt.messages.iter().find(|message| !known(&message.role)) {
        Some(message) => Err(format!("role `{}` is not system, user, assistant or tool", message.role)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn read_text(text: &str) -> Result<Vec<Prompt>, CaptureError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        read(&[file.path().to_path_buf()])
    }

    #[test]
    fn a_bad_line_is_named() {
        let good = r#"{"id":"a","dataset":"d","messages":[{"role":"user","content":"hi"}]}"#;
        assert_eq!(read_text(good).unwrap().len(), 1);
        for (bad, says) in [
            (r#"{"id":"b","dataset":"d","messages":[{"role":"user","con"#, "not a prompt"),
            (r#"{"id":"b","dataset":"d","messages":[]}"#, "no messages"),
            (r#"{"id":"b","dataset":"d","messages":[{"role":"robot","content":"x"}]}"#, "robot"),
            (r#"{"id":"b","dataset":"d","messages":[{"role":"assistant","content":"x"}]}"#, "nothing to answer"),
            (good, "seen before"),
        ] {
            let error = read_text(&format!("{good}\n\n{bad}\n")).unwrap_err().to_string();
            assert!(error.contains(":3: ") && error.contains(says), "{error}");
        }
    }

    #[test]
    fn the_split_keeps_to_its_share() {
        let prompt = |i: usize| Prompt { id: format!("p{i}"), dataset: "d".into(), messages: vec![] };
        let held_out = (0..2000).filter(|&i| prompt(i).is_held_out(0.1)).count();
        assert!((150..250).contains(&held_out), "{held_out}");
        assert_eq!((0..2000).filter(|&i| prompt(i).is_held_out(0.0)).count(), 0);
    }
}
