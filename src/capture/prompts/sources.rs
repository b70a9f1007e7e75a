//! Where rows come from: JSONL, one JSON array, Parquet; a file, a folder, a glob or a dataset of the hub.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;

use super::super::CaptureError;

/// One file of rows.
pub struct Source {
    pub path: PathBuf,
    /// What its rows are counted under where they do not say.
    pub dataset: String,
}

/// The files that a source names, in order.
///
/// # Errors
/// When nothing is there, or the hub does not give it.
pub fn files(path: &Path) -> Result<Vec<Source>, CaptureError> {
    if let Some(name) = path.to_str().and_then(|text| text.strip_prefix("hub:")) {
        return from_hub(name);
    }
    let fail = |reason: String| CaptureError::Source { source_name: path.display().to_string(), reason };
    let mut found: Vec<PathBuf> = if path.is_dir() {
        below(path)?
    } else if path.exists() {
        vec![path.to_path_buf()]
    } else {
        let pattern = path.to_str().filter(|text| text.contains(['*', '?', '['])).ok_or_else(|| {
            fail("is not there; a source is a file, a folder, a glob like `data/*.jsonl` or `hub:owner/name`".into())
        })?;
        let matched = glob::glob(pattern).map_err(|e| fail(e.to_string()))?;
        let mut files = Vec::new();
        for entry in matched {
            let entry = entry.map_err(|e| fail(e.to_string()))?;
            files.extend(if entry.is_dir() { below(&entry)? } else { vec![entry] });
        }
        files
    };
    found.sort();
    if found.is_empty() {
        return Err(fail("no .jsonl, .json or .parquet file here".into()));
    }
    Ok(found.into_iter().map(|path| Source { dataset: dataset_of(&path), path }).collect())
}

/// Files with a known ending in a folder and its folders.
fn below(folder: &Path) -> Result<Vec<PathBuf>, CaptureError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(CaptureError::io(folder))? {
        let path = entry.map_err(CaptureError::io(folder))?.path();
        if path.is_dir() {
            found.extend(below(&path)?);
        } else if path.extension().is_some_and(|e| e == "jsonl" || e == "json" || e == "parquet") {
            found.push(path);
        }
    }
    Ok(found)
}

/// The file's name; its folder's where the name is only a part's number (`train-00003-of-00010.parquet`).
fn dataset_of(path: &Path) -> String {
    let name = |part: Option<&std::ffi::OsStr>| part.map_or_else(String::new, |s| s.to_string_lossy().into_owned());
    let stem = name(path.file_stem());
    let part = stem.split(['-', '_', '.']).all(|word| {
        word.chars().all(|c| c.is_ascii_digit())
            || matches!(word, "of" | "train" | "test" | "sft" | "gen" | "data" | "part" | "chunk" | "default" | "shard")
    });
    match path.parent().map(Path::file_name) {
        Some(Some(folder)) if part => name(Some(folder)),
        _ => stem,
    }
}

/// Downloads the Parquet and JSON files of a dataset into the hub's own cache.
fn from_hub(name: &str) -> Result<Vec<Source>, CaptureError> {
    let fail = |reason: String| CaptureError::Source { source_name: format!("hub:{name}"), reason };
    let api = hf_hub::api::sync::ApiBuilder::from_env().with_retries(1).build().map_err(|e| fail(e.to_string()))?;
    let repo = api.dataset(name.to_string());
    let info = repo.info().map_err(|e| fail(format!("the hub does not list it: {e}")))?;
    let wanted = |file: &str| file.ends_with(".parquet") || file.ends_with(".jsonl") || file.ends_with(".json");
    // Test and validation splits are for measuring on.
    let measured = |file: &str| file.contains("test") || file.contains("validation") || file.contains("eval");
    let mut names: Vec<String> = info.siblings.into_iter().map(|s| s.rfilename).filter(|f| wanted(f)).collect();
    if names.iter().any(|file| file.ends_with(".parquet")) {
        names.retain(|file| file.ends_with(".parquet"));
    }
    if names.iter().any(|file| !measured(file)) {
        names.retain(|file| !measured(file));
    }
    names.sort();
    let dataset = name.rsplit('/').next().unwrap_or(name).to_string();
    let mut found = Vec::new();
    for file in names {
        tracing::info!("fetching {name}: {file}");
        let path = repo.get(&file).map_err(|e| fail(format!("{file}: {e}")))?;
        found.push(Source { path, dataset: dataset.clone() });
    }
    if found.is_empty() { Err(fail("it holds no .parquet, .jsonl or .json file".into())) } else { Ok(found) }
}

/// Hands every row to `take` with its number from 1; a row that is no JSON comes as its error.
///
/// # Errors
/// When the file cannot be read, or `take` refuses.
pub fn rows(
    source: &Source,
    mut take: impl FnMut(usize, Result<Value, String>) -> Result<(), CaptureError>,
) -> Result<(), CaptureError> {
    let path = &source.path;
    let file = File::open(path).map_err(CaptureError::io(path))?;
    if path.extension().is_some_and(|e| e == "parquet") {
        let fail = |e: parquet::errors::ParquetError| CaptureError::Source {
            source_name: path.display().to_string(),
            reason: format!("not a Parquet file: {e}"),
        };
        let reader = SerializedFileReader::new(file).map_err(fail)?;
        for (i, row) in reader.get_row_iter(None).map_err(fail)?.enumerate() {
            take(i + 1, row.map(|row| row.to_json_value()).map_err(|e| format!("a torn row: {e}")))?;
        }
        return Ok(());
    }
    let mut lines = BufReader::new(file);
    let first = lines.fill_buf().map_err(CaptureError::io(path))?.iter().find(|b| !b.is_ascii_whitespace()).copied();
    if first == Some(b'[') {
        // One JSON array, as ShareGPT and glaive come. Its rows are read one by one, not as a tree.
        let read = serde_json::from_reader::<_, Vec<Box<serde_json::value::RawValue>>>(lines);
        let items = read.map_err(|e| CaptureError::Prompt {
            path: path.clone(),
            line: e.line(),
            reason: format!("the file begins as a JSON array, but {e}"),
        })?;
        for (i, item) in items.iter().enumerate() {
            take(i + 1, serde_json::from_str(item.get()).map_err(|e| format!("not JSON: {e}")))?;
        }
        return Ok(());
    }
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        if lines.read_until(b'\n', &mut line).map_err(CaptureError::io(path))? == 0 {
            return Ok(());
        }
        number += 1;
        if !line.iter().all(u8::is_ascii_whitespace) {
            take(number, serde_json::from_slice(&line).map_err(|e| format!("not JSON: {e}")))?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_after_their_folder() {
        for (path, name) in [
            ("x/b1_glaive.jsonl", "b1_glaive"),
            ("x/ultrachat/train_sft-00000-of-00003.parquet", "ultrachat"),
            ("x/wild/data/0001.parquet", "data"),
            ("b2_code-part.jsonl", "b2_code-part"),
        ] {
            assert_eq!(dataset_of(Path::new(path)), name);
        }
    }

    #[test]
    fn arrays_lines_and_globs() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.json"), "\n [{\"x\": 1},\n {\"x\": 2}]").unwrap();
        std::fs::write(folder.path().join("b.jsonl"), "{\"x\": 3}\n\n{\"x\":").unwrap();
        let found = files(&folder.path().join("*.js*")).unwrap();
        assert_eq!(found.len(), 2);
        let mut seen = Vec::new();
        for source in &found {
            rows(source, |n, value| {
                seen.push((n, value.is_ok()));
                Ok(())
            })
            .unwrap();
        }
        assert_eq!(seen, [(1, true), (2, true), (1, true), (3, false)]);
        assert!(files(&folder.path().join("none.jsonl")).is_err());
        assert!(files(&folder.path().join("*.parquet")).is_err());
    }
}
