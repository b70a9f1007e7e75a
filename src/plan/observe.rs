//! What a capture has left in its folder, as a forecast needs it.
//!
//! Everything is read, nothing is locked or written: a plan may be made while the capture runs.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use serde::de::DeserializeOwned;

use super::forecast::Model;
use super::{PlanError, Setting, Span};
use crate::capture::engine::ServerFacts;
use crate::capture::jobs::Classes;
use crate::capture::journal::read_lines;
use crate::capture::live::{RunFile, observe};
use crate::capture::prompts;
use crate::capture::reasoning::Marks;
use crate::capture::status::{Flights, Hours, Observed, Pace, Status};
use crate::capture::{CaptureError, Sequence};
use crate::recipe::{Concurrency, Recipe};

/// Tokens of a block of the prefix count: what servers share is shared in pages, not in tokens.
const BLOCK: usize = 64;
/// Seconds of status that tell how the servers are now.
const RECENT_S: f64 = 120.0;
/// Answers before a screen tells the time left.
const ENOUGH: usize = 16;
/// Draws of a screen's forecast.
const SCREEN_DRAWS: usize = 100;

/// What is known of a capture.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sight {
    pub observed: Observed,
    pub setting: Setting,
    /// Name of the engine; empty where no live run has begun.
    pub engine: String,
    /// Facts of each server.
    pub servers: Vec<ServerFacts>,
    /// Requests in flight, running and queued at the servers, over the last two minutes of the run.
    pub in_flight: Option<f64>,
    pub running: Option<f64>,
    pub queued: Option<f64>,
    pub kv_use: Option<f64>,
    /// Share of prompt tokens that stand at the beginning of an earlier prompt too.
    pub shared_prefix: f64,
    pub failed: usize,
    pub skipped: usize,
    pub duplicates: usize,
    /// The run is over: all that was wanted is there.
    pub whole: bool,
}

/// Reads the folder of a recipe's capture.
///
/// # Errors
/// When nothing was captured yet, a file is broken, or the prompts must be counted and cannot be read.
pub fn look(recipe: &Recipe, marks: &Marks) -> Result<Sight, PlanError> {
    let folder = &recipe.capture.out;
    let classes = Classes::new(&recipe.capture);
    let mut sight = Sight::default();
    let journal = folder.join("journal.jsonl");
    if !journal.exists() {
        let why = format!("{}: no capture has begun there; begin one, or let `--pilot 200` do", folder.display());
        return Err(PlanError::Nothing(why));
    }
    let mut blocks = Blocks::default();
    let observed = &mut sight.observed;
    read_lines(&journal, &mut |sequence: Sequence| {
        observe(observed, &sequence, marks, &classes);
        blocks.add(&sequence.prompt_ids);
    })?;
    if observed.finished.is_empty() {
        return Err(PlanError::Nothing(format!("{}: no answer is there yet", journal.display())));
    }
    sight.shared_prefix = blocks.shared();
    let run: Option<RunFile> = read(&folder.join("run.json"))?;
    match run {
        Some(run) => take_run(&mut sight, run, &classes, recipe.capture.held_out_share),
        None => count_prompts(&mut sight, recipe, &classes)?,
    }
    let failed = folder.join("failed.jsonl");
    if failed.exists() {
        read_lines(&failed, &mut |_: serde::de::IgnoredAny| sight.failed += 1)?;
    }
    let now = take_status(&mut sight, &folder.join("status.jsonl"))?;
    let flights: Option<Flights> = read(&folder.join("in_flight.json"))?;
    if let Some(flights) = flights {
        sight.observed.streaming = flights.streaming;
        // Those of a run that was killed are lost: they tell how long answers are, and are asked again.
        sight.observed.flights = flights.flights;
    }
    sight.whole = sight.observed.groups.iter().all(|g| g.done >= g.wanted);
    sight.setting = Setting { limit: now, running: running(&sight), classes: numbers(recipe, &classes) };
    Ok(sight)
}

/// Requests in flight of each class that has a number of its own.
fn numbers(recipe: &Recipe, classes: &Classes) -> BTreeMap<String, usize> {
    let of = recipe.capture.class.iter().zip(&classes.0);
    of.filter_map(|(class, settled)| match class.concurrency {
        Some(Concurrency::Fixed(n)) => Some((settled.name.clone(), n)),
        _ => None,
    })
    .collect()
}

/// The time left as a running capture's screen shows it, asked each few seconds, so with fewer draws than a plan.
///
/// Nothing before [`ENOUGH`] answers: the first to be whole are the short ones.
pub fn time_left(recipe: &Recipe) -> impl FnMut(&Observed) -> Option<Hours> {
    let setting = Setting { classes: numbers(recipe, &Classes::new(&recipe.capture)), ..Setting::default() };
    move |observed| {
        if observed.finished.len() < ENOUGH {
            return None;
        }
        let model = Model::fit(observed, &setting, SCREEN_DRAWS);
        let Span { low, middle, high } = model.outlook(&model.as_is()).hours?;
        Some(Hours { low, middle, high })
    }
}

/// A JSON file, where it is there.
fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, CaptureError> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| CaptureError::io(path)(e.into())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(CaptureError::io(path)(e)),
    }
}

/// What the last run set out to do. Its recipe may have been another: classes are found by name, else by dataset, and a
/// `take` that is smaller now holds.
fn take_run(sight: &mut Sight, run: RunFile, classes: &Classes, held_out_share: f64) {
    for group in run.groups.iter().filter(|g| g.wanted > 0) {
        let dataset = group.dataset.as_str();
        let named = match group.class.as_str() {
            // Outside every class then, all that no bound on prompts keeps out of one may be in it now.
            "" => classes.0.iter().find(|c| c.takes_all(dataset)),
            name => classes.0.iter().find(|c| c.name == name && c.takes(dataset)),
        };
        let Some(class) = named.or_else(|| classes.0.iter().find(|c| c.takes(dataset))) else { continue };
        let at = sight.observed.group(&class.name, &group.dataset, class.max_tokens);
        let most = if class.take > 0 { class.answers(class.take, held_out_share) } else { usize::MAX };
        sight.observed.groups[at].wanted += group.wanted.min(most);
    }
    sight.engine = run.engine;
    sight.servers = run.servers;
    (sight.skipped, sight.duplicates) = (run.skipped, run.duplicates);
}

/// Without a live run's file the prompts are counted; their lengths are not known, so a class is found by dataset.
fn count_prompts(sight: &mut Sight, recipe: &Recipe, classes: &Classes) -> Result<(), PlanError> {
    let read = prompts::read(&recipe.capture.prompts, recipe.data.on_bad)?;
    for prompt in &read.prompts {
        let known = sight.observed.groups.iter().position(|g| g.dataset == prompt.dataset);
        let at = known.unwrap_or_else(|| {
            let class = &classes.0[classes.of(&prompt.dataset, 1)];
            sight.observed.group(&class.name, &prompt.dataset, class.max_tokens)
        });
        sight.observed.groups[at].wanted += 1;
    }
    for group in &mut sight.observed.groups {
        let class = classes.0.iter().find(|c| c.name == group.class && c.takes(&group.dataset));
        if let Some(class) = class {
            let prompts = if class.take > 0 { group.wanted.min(class.take) } else { group.wanted };
            group.wanted = class.answers(prompts, recipe.capture.held_out_share);
        }
    }
    Ok(())
}

/// The run's course, and how the servers are now. Returns the requests that may be in flight.
fn take_status(sight: &mut Sight, path: &Path) -> Result<Option<f64>, PlanError> {
    if !path.exists() {
        return Ok(None);
    }
    let mut recent: Vec<Status> = Vec::new();
    let pace = &mut sight.observed.pace;
    read_lines(path, &mut |status: Status| {
        pace.push(Pace {
            run: status.run,
            at: status.at,
            tokens: status.tokens,
            prompt_tokens: status.prompt_tokens,
            in_flight: status.servers.iter().map(|s| s.in_flight).sum(),
        });
        recent.push(status);
        let last = recent.last().map_or(0.0, |s| s.at);
        recent.retain(|s| last - s.at <= RECENT_S);
    })?;
    let Some(last) = recent.last() else { return Ok(None) };
    let limit = last.servers.iter().map(|s| s.limit).sum::<usize>();
    // The last moments of a run that ended are of an emptying server.
    let busy = |s: &&Status| s.servers.iter().map(|s| s.in_flight).sum::<usize>() * 10 >= limit * 9;
    let middle = |of: &dyn Fn(&Status) -> Option<f64>| {
        let mut all: Vec<f64> = recent.iter().filter(busy).filter_map(of).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied()
    };
    let sum = |of: fn(&crate::capture::status::ServerStatus) -> Option<usize>| {
        move |s: &Status| s.servers.iter().map(of).collect::<Option<Vec<_>>>().map(|n| n.iter().sum::<usize>() as f64)
    };
    sight.in_flight = middle(&sum(|s| Some(s.in_flight)));
    sight.running = middle(&sum(|s| s.running));
    sight.queued = middle(&sum(|s| s.waiting));
    sight.kv_use = middle(&|s: &Status| s.servers.iter().filter_map(|s| s.kv_use).reduce(f64::max));
    Ok(Some(limit as f64))
}

/// Requests that run at the servers: as they say, else as many as their caches have room for.
fn running(sight: &Sight) -> Option<f64> {
    let in_flight = sight.in_flight.or_else(|| {
        let most = sight.observed.finished.iter().map(|f| f.in_flight).max().filter(|&n| n > 0);
        most.map(|n| n as f64)
    });
    sight.running.or_else(|| Some(in_flight?.min(sight.room()?))).or(in_flight)
}

impl Sight {
    /// KV tokens a running request holds on average.
    pub fn resident(&self) -> f64 {
        let finished = &self.observed.finished;
        let prompts = finished.iter().map(|f| f.prompt_tokens as f64).sum::<f64>() / finished.len().max(1) as f64;
        crate::capture::concurrency::resident(prompts, finished.iter().map(|f| f.tokens as f64), 0.0)
    }

    /// KV tokens of all servers together.
    pub fn kv_tokens(&self) -> Option<f64> {
        let all: Option<Vec<usize>> = self.servers.iter().map(|s| s.kv_tokens).collect();
        all.filter(|all| !all.is_empty()).map(|all| all.iter().sum::<usize>() as f64)
    }

    /// Requests the servers' KV caches have room for.
    pub fn room(&self) -> Option<f64> {
        Some(self.kv_tokens()? / self.resident().max(1.0))
    }
}

/// Counts prompt blocks that are like an earlier prompt's up to their end.
#[derive(Default)]
struct Blocks {
    seen: HashSet<u64>,
    shared: usize,
    all: usize,
}

impl Blocks {
    fn add(&mut self, ids: &[u32]) {
        let mut hash = DefaultHasher::new();
        self.all += ids.len();
        for block in ids.chunks_exact(BLOCK) {
            block.hash(&mut hash);
            if !self.seen.insert(hash.finish()) {
                self.shared += BLOCK;
            }
        }
    }

    fn shared(&self) -> f64 {
        self.shared as f64 / self.all.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_beginnings_are_counted_by_block() {
        let mut blocks = Blocks::default();
        let system: Vec<u32> = (0..128).collect();
        blocks.add(&[&system[..], &[7; 64]].concat());
        assert_eq!(blocks.shared(), 0.0);
        blocks.add(&[&system[..], &[8; 64]].concat());
        // The same block elsewhere is not a shared beginning.
        blocks.add(&[7; 64]);
        assert_eq!((blocks.shared, blocks.all), (128, 192 * 2 + 64));
    }
}
