//! Reads sequences, and tells of every line that is none.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::Value;

use super::TrainSequence;
use super::loops::find_loop;
use crate::capture::Sequence;
use crate::recipe::{DataRecipe, OnBad, SegmentKind};

/// How sequences are read.
#[derive(Debug, Clone)]
pub struct ReadOptions {
    /// Ids at or above it are no tokens of the target.
    pub vocab_size: usize,
    /// Output segments that are supervised; empty means the whole output.
    pub supervise: Vec<SegmentKind>,
    pub on_bad: OnBad,
    pub drop_loops: bool,
    /// Longest sequence in tokens; longer ones are cut at the end.
    pub max_length: usize,
    /// Most tokens; sequences that do not fit are left off. 0 takes all.
    pub max_tokens: usize,
}

impl ReadOptions {
    /// What a recipe asks of training sequences.
    pub fn new(recipe: &DataRecipe, vocab_size: usize) -> Self {
        Self {
            vocab_size,
            supervise: recipe.supervise.clone(),
            on_bad: recipe.on_bad,
            drop_loops: recipe.drop_loops,
            max_length: recipe.max_length,
            max_tokens: recipe.max_tokens,
        }
    }
}

/// Why sequences cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// Not a Parquet file.
    #[error("{path}: not a Parquet file: {reason}")]
    Parquet { path: PathBuf, reason: String },
    /// A folder without sequences.
    #[error("{path}: no .jsonl or .parquet file here")]
    Empty { path: PathBuf },
    /// A bad line, where the recipe refuses them.
    #[error("{0}; data.on_bad = \"skip\" leaves such lines out")]
    Refused(String),
}

/// What is wrong with a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bad {
    Torn,
    OutsideVocabulary,
    Segments,
    MaskLength,
    NothingSupervised,
    Duplicate,
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Torn => "torn or of another form",
            Self::OutsideVocabulary => "with an id outside the vocabulary",
            Self::Segments => "whose segments do not tile the output",
            Self::MaskLength => "whose mask has another length than its ids",
            Self::NothingSupervised => "without a supervised token",
            Self::Duplicate => "with an id seen before",
        })
    }
}

/// Messages kept of bad lines.
const EXAMPLES: usize = 20;

/// What was read and what was left out.
#[derive(Debug, Clone, Default)]
pub struct ReadReport {
    pub sequences: usize,
    pub tokens: usize,
    pub supervised: usize,
    /// Lines left out, by reason.
    pub bad: BTreeMap<Bad, usize>,
    /// The first of them, with file, line and what was wrong.
    pub examples: Vec<String>,
    /// Outputs that repeat themselves: dropped, or kept where the recipe says so.
    pub loops: usize,
    pub loops_dropped: bool,
    /// Sequences cut to the greatest length.
    pub cut: usize,
    /// Sequences left off because there were enough tokens.
    pub left_off: usize,
}

impl fmt::Display for ReadReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} sequences, {} tokens, {} supervised", self.sequences, self.tokens, self.supervised)?;
        let verb = if self.loops_dropped { "dropped" } else { "kept" };
        write!(f, "; {} loops {verb}, {} cut, {} left off", self.loops, self.cut, self.left_off)?;
        let all =
            [Bad::Torn, Bad::OutsideVocabulary, Bad::Segments, Bad::MaskLength, Bad::NothingSupervised, Bad::Duplicate];
        write!(f, "; bad lines:")?;
        for (i, bad) in all.iter().enumerate() {
            write!(f, "{} {} {bad}", if i == 0 { "" } else { "," }, self.bad.get(bad).unwrap_or(&0))?;
        }
        Ok(())
    }
}

/// Reads sequences from files, and from the `.jsonl` and `.parquet` files of folders, in order.
///
/// A JSONL line is a captured [`Sequence`] or a row `{input_ids, loss_mask}`; a Parquet row is the latter.
///
/// # Errors
/// When a file cannot be read, or at the first bad line under [`OnBad::Refuse`].
pub fn read(paths: &[PathBuf], options: &ReadOptions) -> Result<(Vec<TrainSequence>, ReadReport), ReadError> {
    let mut reader = Reader {
        options,
        seen: HashSet::new(),
        taken: Vec::new(),
        report: ReadReport { loops_dropped: options.drop_loops, ..ReadReport::default() },
    };
    for path in paths {
        for file in files(path)? {
            if file.extension().is_some_and(|e| e == "parquet") {
                reader.parquet(&file)?
            } else {
                reader.jsonl(&file)?
            }
        }
    }
    Ok((reader.taken, reader.report))
}

fn files(path: &Path) -> Result<Vec<PathBuf>, ReadError> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = std::fs::read_dir(path).map_err(|source| ReadError::Io { path: path.to_path_buf(), source })?;
    let known = |file: &PathBuf| file.extension().is_some_and(|e| e == "jsonl" || e == "parquet");
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| entry.ok().map(|e| e.path())).filter(known).collect();
    files.sort();
    if files.is_empty() { Err(ReadError::Empty { path: path.to_path_buf() }) } else { Ok(files) }
}

/// A line's content before the checks that all kinds share.
struct Draft {
    id: String,
    dataset: String,
    ids: Vec<u32>,
    loss_mask: Vec<bool>,
    prompt_length: usize,
}

type Checked<T> = Result<T, (Bad, String)>;

struct Reader<'a> {
    options: &'a ReadOptions,
    seen: HashSet<String>,
    taken: Vec<TrainSequence>,
    report: ReadReport,
}

impl Reader<'_> {
    fn jsonl(&mut self, path: &Path) -> Result<(), ReadError> {
        let io = |source| ReadError::Io { path: path.to_path_buf(), source };
        let mut lines = BufReader::new(File::open(path).map_err(io)?);
        let mut line = Vec::new();
        let mut number = 0;
        loop {
            line.clear();
            if lines.read_until(b'\n', &mut line).map_err(io)? == 0 {
                return Ok(());
            }
            number += 1;
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let draft = parse_line(&line, path, number, &self.options.supervise);
            self.take(draft, path, number)?;
        }
    }

    fn parquet(&mut self, path: &Path) -> Result<(), ReadError> {
        let fail =
            |e: parquet::errors::ParquetError| ReadError::Parquet { path: path.to_path_buf(), reason: e.to_string() };
        let file = File::open(path).map_err(|source| ReadError::Io { path: path.to_path_buf(), source })?;
        let reader = SerializedFileReader::new(file).map_err(fail)?;
        for (i, row) in reader.get_row_iter(None).map_err(fail)?.enumerate() {
            let draft = match row {
                Ok(row) => parse_row(&row, path, i + 1),
                Err(e) => Err((Bad::Torn, e.to_string())),
            };
            self.take(draft, path, i + 1)?;
        }
        Ok(())
    }

    fn take(&mut self, draft: Checked<Draft>, path: &Path, line: usize) -> Result<(), ReadError> {
        let checked = draft.and_then(|draft| self.check(draft));
        match checked {
            Ok(Some(sequence)) => {
                self.report.sequences += 1;
                self.report.tokens += sequence.ids.len();
                self.report.supervised += sequence.loss_mask.iter().filter(|&&m| m).count();
                self.taken.push(sequence);
            }
            Ok(None) => {}
            Err((bad, reason)) => {
                let message = format!("{}:{line}: {bad}: {reason}", path.display());
                if self.options.on_bad == OnBad::Refuse {
                    return Err(ReadError::Refused(message));
                }
                *self.report.bad.entry(bad).or_default() += 1;
                if self.report.examples.len() < EXAMPLES {
                    self.report.examples.push(message);
                }
            }
        }
        Ok(())
    }

    fn check(&mut self, draft: Draft) -> Checked<Option<TrainSequence>> {
        let Draft { id, dataset, mut ids, mut loss_mask, prompt_length } = draft;
        if loss_mask.len() != ids.len() {
            return Err((Bad::MaskLength, format!("{} mask entries for {} ids", loss_mask.len(), ids.len())));
        }
        if let Some(at) = ids.iter().position(|&token| token as usize >= self.options.vocab_size) {
            let size = self.options.vocab_size;
            return Err((Bad::OutsideVocabulary, format!("id {} at token {at}, the vocabulary has {size}", ids[at])));
        }
        if !self.seen.insert(id.clone()) {
            return Err((Bad::Duplicate, format!("`{id}`")));
        }
        if let Some(found) = find_loop(&ids[prompt_length.min(ids.len())..]) {
            self.report.loops += 1;
            if self.options.drop_loops {
                tracing::debug!("{id}: dropped, {found}");
                return Ok(None);
            }
        }
        let cut = ids.len() > self.options.max_length;
        ids.truncate(self.options.max_length);
        loss_mask.truncate(self.options.max_length);
        // The first token of all has nothing before it to be foretold from.
        if !loss_mask.iter().skip(1).any(|&m| m) {
            let why = if cut { " within data.max_length" } else { "" };
            return Err((Bad::NothingSupervised, format!("`{id}`{why}")));
        }
        self.report.cut += usize::from(cut);
        if self.options.max_tokens > 0 && self.report.tokens + ids.len() > self.options.max_tokens {
            self.report.left_off += 1;
            return Ok(None);
        }
        Ok(Some(TrainSequence { id, dataset, ids, loss_mask, prompt_length }))
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "file".into(), |stem| stem.to_string_lossy().into_owned())
}

fn parse_line(line: &[u8], path: &Path, number: usize, supervise: &[SegmentKind]) -> Checked<Draft> {
    let torn = |reason: String| (Bad::Torn, reason);
    let value: Value = serde_json::from_slice(line).map_err(|e| torn(e.to_string()))?;
    if value.get("input_ids").is_none() {
        let sequence: Sequence = serde_json::from_value(value).map_err(|e| torn(e.to_string()))?;
        return captured(sequence, supervise);
    }
    let list = |key: &str| {
        let list = value.get(key).and_then(Value::as_array).ok_or_else(|| torn(format!("no list `{key}`")))?;
        let number = |v: &Value| v.as_u64().or_else(|| v.as_bool().map(u64::from)).and_then(|n| u32::try_from(n).ok());
        list.iter()
            .map(|v| number(v).ok_or_else(|| torn(format!("`{key}` holds {v}"))))
            .collect::<Result<Vec<u32>, _>>()
    };
    let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_string);
    Ok(masked(list("input_ids")?, &list("loss_mask")?, text("id"), text("dataset"), path, number))
}

fn captured(sequence: Sequence, supervise: &[SegmentKind]) -> Checked<Draft> {
    let Sequence { id, dataset, prompt_ids, output_ids, segments, .. } = sequence;
    let mut end = 0;
    for segment in &segments {
        if segment.start != end || segment.end <= segment.start {
            let reason = format!("a segment {}..{} after output token {end}", segment.start, segment.end);
            return Err((Bad::Segments, reason));
        }
        end = segment.end;
    }
    if end != output_ids.len() && !(segments.is_empty() && supervise.is_empty()) {
        return Err((Bad::Segments, format!("segments end at {end}, the output at {}", output_ids.len())));
    }
    let prompt_length = prompt_ids.len();
    let mut loss_mask = vec![false; prompt_length];
    if supervise.is_empty() {
        loss_mask.resize(prompt_length + output_ids.len(), true);
    } else {
        for segment in &segments {
            loss_mask.resize(prompt_length + segment.end, supervise.contains(&segment.kind));
        }
    }
    let ids = [prompt_ids, output_ids].concat();
    Ok(Draft { id, dataset, ids, loss_mask, prompt_length })
}

fn masked(
    ids: Vec<u32>,
    mask: &[u32],
    id: Option<String>,
    dataset: Option<String>,
    path: &Path,
    number: usize,
) -> Draft {
    let loss_mask: Vec<bool> = mask.iter().map(|&m| m != 0).collect();
    let prompt_length = loss_mask.iter().position(|&m| m).unwrap_or(ids.len());
    Draft {
        id: id.unwrap_or_else(|| format!("{}:{number}", stem(path))),
        dataset: dataset.unwrap_or_else(|| stem(path)),
        ids,
        loss_mask,
        prompt_length,
    }
}

fn parse_row(row: &Row, path: &Path, number: usize) -> Checked<Draft> {
    let torn = |reason: String| (Bad::Torn, reason);
    let field = |key: &str| row.get_column_iter().find(|(name, _)| *name == key).map(|(_, field)| field);
    let list = |key: &str| match field(key) {
        Some(Field::ListInternal(list)) => list
            .elements()
            .iter()
            .map(|element| {
                let number = match element {
                    Field::Bool(b) => Some(u32::from(*b)),
                    Field::Byte(n) => u32::try_from(*n).ok(),
                    Field::UByte(n) => Some(u32::from(*n)),
                    Field::Short(n) => u32::try_from(*n).ok(),
                    Field::UShort(n) => Some(u32::from(*n)),
                    Field::Int(n) => u32::try_from(*n).ok(),
                    Field::UInt(n) => Some(*n),
                    Field::Long(n) => u32::try_from(*n).ok(),
                    Field::ULong(n) => u32::try_from(*n).ok(),
                    _ => None,
                };
                number.ok_or_else(|| torn(format!("`{key}` holds {element}")))
            })
            .collect::<Result<Vec<u32>, _>>(),
        _ => Err(torn(format!("no list column `{key}`"))),
    };
    let text = |key: &str| match field(key) {
        Some(Field::Str(text)) => Some(text.clone()),
        _ => None,
    };
    Ok(masked(list("input_ids")?, &list("loss_mask")?, text("id"), text("dataset"), path, number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn options() -> ReadOptions {
        ReadOptions {
            vocab_size: 100,
            supervise: vec![],
            on_bad: OnBad::Skip,
            drop_loops: true,
            max_length: 64,
            max_tokens: 0,
        }
    }

    fn read_text(text: &[u8], options: &ReadOptions) -> Result<(Vec<TrainSequence>, ReadReport), ReadError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        std::fs::write(&path, text).unwrap();
        read(&[path], options)
    }

    const GOOD: &str = r#"{"id":"a","dataset":"d","prompt_ids":[1,2],"output_ids":[3,4,5],"finish_reason":"stop","sampling":null,"segments":[{"kind":"reasoning","start":0,"end":2},{"kind":"answer","start":2,"end":3}]}"#;

    #[test]
    fn output_tokens_are_supervised_or_the_chosen_segments() {
        let (all, report) = read_text(GOOD.as_bytes(), &options()).unwrap();
        assert_eq!(all[0].ids, [1, 2, 3, 4, 5]);
        assert_eq!(all[0].loss_mask, [false, false, true, true, true]);
        assert_eq!((report.sequences, report.tokens, report.supervised), (1, 5, 3));
        let answer = ReadOptions { supervise: vec![SegmentKind::Answer], ..options() };
        assert_eq!(read_text(GOOD.as_bytes(), &answer).unwrap().0[0].loss_mask, [false, false, false, false, true]);
    }

    #[test]
    fn rows_of_ids_and_mask_are_read() {
        let text = "{\"input_ids\":[7,8,9],\"loss_mask\":[0,1,1]}\n{\"input_ids\":[7,8],\"loss_mask\":[false,true],\"id\":\"x\",\"dataset\":\"k\"}\n";
        let (all, _) = read_text(text.as_bytes(), &options()).unwrap();
        assert_eq!((all[0].id.as_str(), all[0].dataset.as_str(), all[0].prompt_length), ("a:1", "a", 1));
        assert_eq!((all[1].id.as_str(), all[1].dataset.as_str()), ("x", "k"));
    }

    #[test]
    fn each_bad_line_is_counted_and_named() {
        for (line, bad) in [
            (&GOOD[..60], Bad::Torn),
            ("[1, 2]", Bad::Torn),
            (r#"{"input_ids":[1,2,-3],"loss_mask":[0,1,1]}"#, Bad::Torn),
            (r#"{"input_ids":[1,2,300],"loss_mask":[0,1,1]}"#, Bad::OutsideVocabulary),
            (r#"{"input_ids":[1,2,3],"loss_mask":[0,1]}"#, Bad::MaskLength),
            (r#"{"input_ids":[1,2,3],"loss_mask":[0,0,0]}"#, Bad::NothingSupervised),
            (r#"{"input_ids":[1,2,3],"loss_mask":[1,0,0]}"#, Bad::NothingSupervised),
            (r#"{"input_ids":[],"loss_mask":[]}"#, Bad::NothingSupervised),
            (GOOD, Bad::Duplicate),
        ] {
            let text = format!("{GOOD}\n{line}");
            let (all, report) = read_text(text.as_bytes(), &options()).unwrap();
            assert_eq!((all.len(), report.bad.get(&bad)), (1, Some(&1)), "{line}: {report}");
            assert!(report.examples[0].contains("a.jsonl:2: "), "{:?}", report.examples);
            let refuse = ReadOptions { on_bad: OnBad::Refuse, ..options() };
            assert!(read_text(text.as_bytes(), &refuse).unwrap_err().to_string().contains("a.jsonl:2"));
        }
        let gap = GOOD.replace("\"start\":2", "\"start\":1");
        assert_eq!(read_text(gap.as_bytes(), &options()).unwrap().1.bad.get(&Bad::Segments), Some(&1));
        let short = GOOD.replace("[3,4,5]", "[3,4,5,6]");
        assert_eq!(read_text(short.as_bytes(), &options()).unwrap().1.bad.get(&Bad::Segments), Some(&1));
    }

    #[test]
    fn long_sequences_are_cut_and_enough_is_enough() {
        let text = "{\"input_ids\":[7,8,9],\"loss_mask\":[0,1,1]}\n".repeat(3);
        let (all, report) = read_text(text.as_bytes(), &ReadOptions { max_length: 2, ..options() }).unwrap();
        assert_eq!((all[0].ids.len(), report.cut), (2, 3));
        let (all, report) = read_text(text.as_bytes(), &ReadOptions { max_tokens: 7, ..options() }).unwrap();
        assert_eq!((all.len(), report.left_off), (2, 1));
    }

    #[test]
    fn loops_are_dropped_by_default() {
        let ids: Vec<u32> = (0..5).chain(std::iter::repeat_n(9, 90)).collect();
        let mask: Vec<u32> = ids.iter().map(|_| 1).collect();
        let text = serde_json::json!({"input_ids": ids, "loss_mask": mask}).to_string();
        let (all, report) = read_text(text.as_bytes(), &options()).unwrap();
        assert_eq!((all.len(), report.loops), (0, 1));
        let (all, report) = read_text(text.as_bytes(), &ReadOptions { drop_loops: false, ..options() }).unwrap();
        assert_eq!((all.len(), report.loops), (1, 1));
    }

    #[test]
    fn parquet_rows_are_read() {
        use parquet::data_type::Int64Type;
        use parquet::file::writer::SerializedFileWriter;
        let schema = "message m { repeated int64 input_ids; repeated int64 loss_mask; }";
        let nested = "message m { required group input_ids (LIST) { repeated group list { required int64 element; } }
                      required group loss_mask (LIST) { repeated group list { required int64 element; } } }";
        for schema in [schema, nested] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("rows.parquet");
            let parsed = std::sync::Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
            let mut writer =
                SerializedFileWriter::new(File::create(&path).unwrap(), parsed, Default::default()).unwrap();
            let mut group = writer.next_row_group().unwrap();
            for values in [[5i64, 6, 7, 8, 9], [0, 1, 1, 0, 1]] {
                let mut column = group.next_column().unwrap().unwrap();
                // Rows of three and of two elements.
                column.typed::<Int64Type>().write_batch(&values, Some(&[1; 5]), Some(&[0, 1, 1, 0, 1])).unwrap();
                column.close().unwrap();
            }
            group.close().unwrap();
            writer.close().unwrap();
            let (all, report) = read(&[folder.path().to_path_buf()], &options()).unwrap();
            assert_eq!(all.len(), 2, "{report} {:?}", report.examples);
            assert_eq!((all[0].ids.as_slice(), all[1].ids.as_slice()), (&[5, 6, 7][..], &[8, 9][..]));
            assert_eq!(all[1].loss_mask, [false, true]);
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
            assert!(matches!(read(&[path], &options()), Err(ReadError::Parquet { .. })));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_counted(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = read_text(&bytes, &options()).unwrap();
        }

        #[test]
        fn a_mutated_line_is_read_or_counted(at in 0usize..200, byte in any::<u8>()) {
            let mut line = GOOD.as_bytes().to_vec();
            let at = at % line.len();
            line[at] = byte;
            let _ = read_text(&line, &options()).unwrap();
        }
    }
}
