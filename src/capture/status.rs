//! What a capture shows of itself while it runs: for people, for scripts, for planning.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::CaptureError;

/// One class and dataset.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupStatus {
    /// Empty outside every class.
    pub class: String,
    pub dataset: String,
    pub done: usize,
    pub wanted: usize,
    /// Output tokens of those that are done.
    pub tokens: usize,
    /// Requests in flight.
    pub in_flight: usize,
    /// The cap its answers are asked under.
    pub max_tokens: usize,
}

/// One server.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerStatus {
    pub url: String,
    /// It answers.
    pub up: bool,
    /// Requests it may have.
    pub limit: usize,
    pub in_flight: usize,
    pub running: Option<usize>,
    pub waiting: Option<usize>,
    pub kv_use: Option<f64>,
    /// Requests its KV cache has room for at the lengths seen.
    pub room: Option<f64>,
}

/// Hours left, or in all: the middle and a 90% interval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Hours {
    pub low: f64,
    pub middle: f64,
    pub high: f64,
}

/// A run at one moment: a line of status.jsonl.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Seconds since 1970.
    pub at: f64,
    /// When this run began, since 1970; a resumed capture has several runs.
    pub run: f64,
    pub groups: Vec<GroupStatus>,
    pub servers: Vec<ServerStatus>,
    /// Output tokens received in this run, those of answers in flight too.
    pub tokens: f64,
    /// Prompt tokens of requests answered in this run.
    pub prompt_tokens: f64,
    /// Output tokens a second over the last minute.
    pub tokens_per_s: f64,
    pub failed: usize,
    pub retries: usize,
    /// Answers of this run, and those of them that carry reasoning.
    pub answers: usize,
    pub reasoned: usize,
    /// Answers cut by their cap, in this run.
    pub capped: usize,
    /// Answer lengths by power of two: `[i]` counts those of `2^i` to `2^(i+1) - 1` tokens.
    pub histogram: Vec<usize>,
    pub left: Option<Hours>,
}

/// An answer that is not whole yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InFlight {
    pub class: String,
    pub dataset: String,
    pub prompt_tokens: usize,
    /// Tokens so far; 0 also where answers do not stream.
    pub tokens: usize,
    pub max_tokens: usize,
    pub seconds: f64,
}

/// A whole answer, as planning sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Finished {
    /// Which of [`Observed::groups`].
    pub group: usize,
    pub prompt_tokens: usize,
    pub tokens: usize,
    /// It was cut by its cap.
    pub capped: bool,
    pub reasoned: bool,
    /// Seconds since 1970 when it was asked.
    pub asked: f64,
    pub seconds: f64,
    pub in_flight: usize,
}

/// Tokens received in a run up to a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    pub run: f64,
    pub at: f64,
    pub tokens: f64,
    pub prompt_tokens: f64,
    pub in_flight: usize,
}

/// All that is known of a capture at one moment: what a forecast is made of.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Observed {
    pub groups: Vec<GroupStatus>,
    pub finished: Vec<Finished>,
    pub flights: Vec<InFlight>,
    /// Whether the flights' tokens are known.
    pub streaming: bool,
    pub pace: Vec<Pace>,
}

impl Observed {
    /// The group of a class and dataset, made where it is new.
    pub fn group(&mut self, class: &str, dataset: &str, max_tokens: usize) -> usize {
        let same = |g: &GroupStatus| g.class == class && g.dataset == dataset;
        self.groups.iter().position(same).unwrap_or_else(|| {
            let group = GroupStatus { class: class.into(), dataset: dataset.into(), max_tokens, ..Default::default() };
            self.groups.push(group);
            self.groups.len() - 1
        })
    }

    /// Takes in an answer.
    pub fn finish(&mut self, finished: Finished) {
        let group = &mut self.groups[finished.group];
        group.done += 1;
        group.tokens += finished.tokens;
        self.finished.push(finished);
    }
}

/// in_flight.json: what a plan made meanwhile must count as longer than it looks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Flights {
    pub at: f64,
    pub streaming: bool,
    pub flights: Vec<InFlight>,
}

impl Flights {
    /// Writes the file beside and renames it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), CaptureError> {
        write_json(&folder.join("in_flight.json"), self)
    }
}

/// Writes a JSON file beside and renames it.
///
/// # Errors
/// When it cannot be written.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), CaptureError> {
    let beside = path.with_extension("json.part");
    let text = serde_json::to_string(value).map_err(|e| CaptureError::io(path)(e.into()))?;
    std::fs::write(&beside, text).map_err(CaptureError::io(&beside))?;
    std::fs::rename(&beside, path).map_err(CaptureError::io(path))
}

impl Status {
    /// Answers done and wanted in all.
    pub fn done(&self) -> (usize, usize) {
        self.groups.iter().fold((0, 0), |(done, wanted), g| (done + g.done, wanted + g.wanted))
    }

    /// One line for a log.
    pub fn line(&self) -> String {
        let (done, wanted) = self.done();
        let in_flight: usize = self.servers.iter().map(|s| s.in_flight).sum();
        let mut line = format!("{done} of {wanted} answers, {:.0} tokens/s, {in_flight} in flight", self.tokens_per_s);
        let waiting: Vec<usize> = self.servers.iter().filter_map(|s| s.waiting).collect();
        if !waiting.is_empty() {
            line += &format!(", {} queued", waiting.iter().sum::<usize>());
        }
        if let Some(used) = self.servers.iter().filter_map(|s| s.kv_use).reduce(f64::max) {
            line += &format!(", KV {:.0}%", used * 100.0);
        }
        if self.failed > 0 || self.retries > 0 {
            line += &format!(", {} retries, {} failed", self.retries, self.failed);
        }
        let down = self.servers.iter().filter(|s| !s.up).count();
        if down > 0 {
            line += &format!(", {down} of {} servers silent", self.servers.len());
        }
        match &self.left {
            Some(left) => line + &format!(", {} left ({})", hours(left.middle), span(left)),
            None => line,
        }
    }

    /// The screen of a terminal: a line a dataset, one a server, the lengths.
    pub fn screen(&self) -> String {
        let mut text = self.line();
        let width = self.groups.iter().map(|g| g.dataset.len()).max().unwrap_or(0);
        for group in &self.groups {
            let share = group.done as f64 / group.wanted.max(1) as f64;
            let filled = (share * 24.0) as usize;
            let mean = group.tokens as f64 / group.done.max(1) as f64;
            let class = if group.class.is_empty() { String::new() } else { format!("  {}", group.class) };
            text += &format!(
                "\n  {:width$} {}{} {}/{}  mean {mean:.0}  {} in flight{class}",
                group.dataset,
                "█".repeat(filled),
                "░".repeat(24 - filled.min(24)),
                group.done,
                group.wanted,
                group.in_flight,
            );
        }
        for server in &self.servers {
            let part = |name: &str, n: Option<usize>| n.map_or(String::new(), |n| format!("  {name} {n}"));
            text += &format!(
                "\n  {}  {}/{} in flight{}{}{}{}{}",
                server.url,
                server.in_flight,
                server.limit,
                part("running", server.running),
                part("queued", server.waiting),
                server.kv_use.map_or(String::new(), |used| format!("  KV {:.0}%", used * 100.0)),
                server.room.map_or(String::new(), |room| format!("  room for about {room:.0}")),
                if server.up { "" } else { "  SILENT, probing" },
            );
        }
        let most = self.histogram.iter().copied().max().unwrap_or(0).max(1);
        let bars: String = self
            .histogram
            .iter()
            .map(|&n| [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][(n * 8).div_ceil(most)])
            .collect();
        if self.answers > 0 {
            let share = |n: usize| n as f64 * 100.0 / self.answers as f64;
            text += &format!(
                "\n  lengths |{bars}| 2^{}  {:.1}% at the cap  {:.0}% with reasoning",
                self.histogram.len(),
                share(self.capped),
                share(self.reasoned)
            );
        }
        text
    }
}

/// A length's place in [`Status::histogram`].
pub fn bin(tokens: usize) -> usize {
    tokens.max(1).ilog2() as usize
}

/// Hours as people say them.
pub fn hours(hours: f64) -> String {
    match hours {
        h if !h.is_finite() => "unknown".into(),
        h if h < 1.0 / 60.0 => format!("{:.0} s", h * 3600.0),
        h if h < 2.0 => format!("{:.0} min", h * 60.0),
        h if h < 100.0 => format!("{h:.1} h"),
        h => format!("{:.1} days", h / 24.0),
    }
}

/// An interval as people say it.
pub fn span(left: &Hours) -> String {
    format!("{} to {}", hours(left.low), hours(left.high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_screens_say_what_counts() {
        let status = Status {
            groups: vec![GroupStatus { dataset: "b1".into(), done: 3, wanted: 12, tokens: 300, ..Default::default() }],
            servers: vec![ServerStatus {
                url: "http://x".into(),
                up: true,
                limit: 52,
                in_flight: 50,
                running: Some(48),
                waiting: Some(2),
                kv_use: Some(0.97),
                room: Some(49.6),
            }],
            tokens_per_s: 860.4,
            answers: 3,
            reasoned: 3,
            histogram: vec![0, 1, 2],
            left: Some(Hours { low: 50.0, middle: 57.2, high: 130.0 }),
            ..Status::default()
        };
        assert_eq!(
            status.line(),
            "3 of 12 answers, 860 tokens/s, 50 in flight, 2 queued, KV 97%, 57.2 h left (50.0 h to 5.4 days)"
        );
        let screen = status.screen();
        assert!(screen.contains("██████░") && screen.contains("room for about 50") && screen.contains("100% with"));
        assert_eq!((bin(0), bin(1), bin(2), bin(1023), bin(1024)), (0, 0, 1, 9, 10));
    }
}
