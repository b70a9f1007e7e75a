//! Reads prompts in the shapes people have them.
//!
//! In: files, folders, globs or hub datasets. Out: [`Prompt`]s, and a count of the rows that are none.
//! Open `sources.rs` for where rows come from, `shapes.rs` for how a row becomes a conversation.

mod shapes;
mod sources;

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::CaptureError;
use crate::recipe::OnBad;
use crate::target::Message;

/// A conversation that waits for its next assistant turn, or ready ids.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Unique among all sources.
    pub id: String,
    /// The kind it is counted under.
    pub dataset: String,
    pub content: Content,
}

/// What the target is asked.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// All turns up to the last that is no assistant's; assistant turns before it are history.
    Messages { messages: Vec<Message>, tools: Option<Value> },
    /// Ids that are sent as they are.
    Ids(Vec<u32>),
}

impl Prompt {
    /// Whether the prompt is held out, by a hash of its id alone: the same prompt falls on the same side in every
    /// capture, whatever else the files hold.
    pub fn is_held_out(&self, share: f64) -> bool {
        is_held_out(super::journal::prompt_of(&self.id).0, share)
    }

    /// A number that orders prompts at random but always alike.
    pub fn rank(&self) -> u64 {
        let hash = Sha256::digest(format!("rank {}", self.id).as_bytes());
        u64::from_le_bytes(std::array::from_fn(|i| hash[i]))
    }
}

/// [`Prompt::is_held_out`] by the prompt's id.
pub fn is_held_out(id: &str, share: f64) -> bool {
    let hash = Sha256::digest(id.as_bytes());
    let first = u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]);
    f64::from(first) < share * 2f64.powi(32)
}

/// What was read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prompts {
    pub prompts: Vec<Prompt>,
    /// Rows that are no prompt, with file, row and reason, the first of each source.
    pub bad: Vec<String>,
    /// How many such rows each file has.
    pub bad_rows: BTreeMap<String, usize>,
}

/// Messages kept of bad rows of one file.
const EXAMPLES: usize = 5;

/// Reads every prompt of the sources, in order. Ids that repeat are told apart by `~2`, `~3`; only a row of the form
/// `{id, dataset, messages}` must have one of its own.
///
/// # Errors
/// When a source cannot be read, or at the first row that is no prompt under [`OnBad::Refuse`].
pub fn read(paths: &[PathBuf], on_bad: OnBad) -> Result<Prompts, CaptureError> {
    let mut all = Prompts::default();
    let mut seen: HashSet<String> = HashSet::new();
    let mut repeats: BTreeMap<String, usize> = BTreeMap::new();
    for path in paths {
        for file in sources::files(path)? {
            sources::rows(&file, |row, value| {
                let fail = |reason: String| CaptureError::Prompt { path: file.path.clone(), line: row, reason };
                let read =
                    value.and_then(|value| shapes::prompt(&value, &file.dataset, row)).and_then(|(mut p, own)| {
                        if !seen.insert(p.id.clone()) {
                            if own {
                                return Err(format!("the id `{}` was seen before", p.id));
                            }
                            let n = repeats.entry(p.id.clone()).or_insert(1);
                            *n += 1;
                            p.id = format!("{}~{n}", p.id);
                            seen.insert(p.id.clone());
                        }
                        Ok(p)
                    });
                match read {
                    Ok(prompt) => all.prompts.push(prompt),
                    Err(reason) if on_bad == OnBad::Refuse => return Err(fail(reason)),
                    Err(reason) => {
                        let count = all.bad_rows.entry(file.path.display().to_string()).or_default();
                        *count += 1;
                        if *count <= EXAMPLES {
                            all.bad.push(fail(reason).to_string());
                        }
                    }
                }
                Ok(())
            })?;
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn read_text(text: &str, on_bad: OnBad) -> Result<Prompts, CaptureError> {
        let mut file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        read(&[file.path().to_path_buf()], on_bad)
    }

    #[test]
    fn a_bad_line_is_named() {
        let good = r#"{"id":"a","dataset":"d","messages":[{"role":"user","content":"hi"}]}"#;
        assert_eq!(read_text(good, OnBad::Refuse).unwrap().prompts.len(), 1);
        for (bad, says) in [
            (r#"{"id":"b","dataset":"d","messages":[{"role":"user","con"#, "not JSON"),
            (r#"{"id":"b","dataset":"d","messages":[]}"#, "no messages"),
            (r#"{"id":"b","dataset":"d","messages":[{"role":"robot","content":"x"}]}"#, "robot"),
            (r#"{"id":"b","dataset":"d","messages":[{"role":"assistant","content":"x"}]}"#, "nothing to answer"),
            (r#"{"id":"b","dataset":"d","messages":[{"role":"user","content":" "}]}"#, "empty"),
            (r#"{"id":"b","something":"else"}"#, "none of the known shapes"),
            (good, "seen before"),
        ] {
            let text = format!("{good}\n\n{bad}\n");
            let error = read_text(&text, OnBad::Refuse).unwrap_err().to_string();
            assert!(error.contains(":3: ") && error.contains(says), "{error}");
            let skipped = read_text(&text, OnBad::Skip).unwrap();
            assert_eq!((skipped.prompts.len(), skipped.bad_rows.values().sum::<usize>()), (1, 1));
            assert!(skipped.bad[0].contains(says), "{:?}", skipped.bad);
        }
    }

    #[test]
    fn the_split_keeps_to_its_share() {
        let held_out = (0..2000).filter(|i| is_held_out(&format!("p{i}"), 0.1)).count();
        assert!((150..250).contains(&held_out), "{held_out}");
        assert_eq!((0..2000).filter(|i| is_held_out(&format!("p{i}"), 0.0)).count(), 0);
    }
}
