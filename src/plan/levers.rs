//! What would make a capture shorter, by how much, and at what cost.
//!
//! Each lever is a [`Scenario`] of its own, so its saving is computed from the lengths and rates that were seen. They come
//! in the order a careful person would pull them: what is set wrongly, what costs nothing, what changes the data, what
//! costs hardware; within each, by hours saved.

use serde::Serialize;

use super::Span;
use super::forecast::{Model, Outlook, Scenario};
use super::observe::Sight;
use crate::capture::status::hours;
use crate::recipe::Recipe;
use crate::target::family::Family;

/// Caps people choose from.
pub const CAPS: [usize; 16] =
    [256, 512, 1000, 1500, 2000, 2500, 3000, 4000, 5000, 6000, 8000, 10_000, 12_000, 16_000, 24_000, 32_000];
/// A cap may cut this share of answers before it changes what the data is.
pub const MAY_CUT: f64 = 0.04;
/// Queued requests beyond this share of the running ones gain nothing.
const QUEUE_SHARE: f64 = 0.25;
/// Share of a GPU that engines can be given; above it long prompts run out of memory.
const MEMORY_MOST: f64 = 0.93;
/// Held-out loss that twice the data must at least take off.
const WORTH: f64 = 0.01;

/// How careful one must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It is set wrongly now.
    Wrong,
    /// Nothing is lost by it.
    Free,
    /// Answers are other, shorter or fewer.
    Data,
    /// It takes more machines.
    Hardware,
}

/// One thing to change.
#[derive(Debug, Clone, Serialize)]
pub struct Lever {
    pub kind: Kind,
    /// What it is about, for scripts: `over_subscription`, `memory_fraction`, `cap` …
    pub name: &'static str,
    /// What is so, in a line.
    pub title: String,
    /// What to do.
    pub act: String,
    /// What is lost.
    pub cost: String,
    /// Hours less than as it stands, where a rate is known.
    pub saves: Option<Span>,
    /// Hours left with it.
    pub left: Option<Span>,
    /// Output tokens less.
    pub saves_tokens: f64,
    /// Of a cap: the share of answers it cuts.
    pub cuts: Option<f64>,
    #[serde(skip)]
    pub scenario: Scenario,
}

/// A GPU's memory, where the user says otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hardware {
    /// Bytes of one GPU.
    pub gpu_bytes: f64,
}

/// Finds every lever there is.
pub fn find(recipe: &Recipe, family: Option<&Family>, sight: &Sight, model: &Model, hardware: Hardware) -> Vec<Lever> {
    let now = model.as_is();
    let base = model.outlook(&now);
    let finder = Finder { recipe, family, sight, model, hardware, now, base };
    let mut levers: Vec<Lever> = Vec::new();
    levers.extend(finder.subscription());
    levers.extend(finder.memory());
    levers.extend(finder.hierarchical());
    levers.extend(finder.fp8());
    levers.extend(finder.caps());
    levers.extend(finder.samples());
    levers.extend(finder.gains());
    levers.extend(finder.replicas());
    let saved = |lever: &Lever| lever.saves.map_or(0.0, |s| s.middle);
    levers.sort_by(|a, b| a.kind.cmp(&b.kind).then(saved(b).total_cmp(&saved(a))));
    levers
}

/// What comes of several levers at once: running requests, prompt work, caps and numbers of each, whichever is furthest.
/// `most` is how many requests want to run.
pub fn together<'a>(model: &Model, most: f64, levers: impl Iterator<Item = &'a Lever>) -> Outlook {
    let mut all = model.as_is();
    for lever in levers {
        let scenario = &lever.scenario;
        // Room is made by each of them anew: what they bring multiplies.
        let factor = scenario.running.map(|r| r / model.running().0);
        all.running = match (all.running, factor) {
            (Some(r), Some(f)) => Some(r * f),
            (None, Some(f)) => Some(model.running().0 * f),
            (r, None) => r,
        };
        all.speed *= scenario.speed;
        all.prompts *= scenario.prompts;
        for (group, other) in all.groups.iter_mut().zip(&scenario.groups) {
            *group = (group.0.min(other.0), group.1.min(other.1));
        }
    }
    // More room than requests that want it is no use.
    all.running = all.running.map(|r| r.min(most.max(model.running().0)));
    model.outlook(&all)
}

/// Requests that would run if there were room; under auto what may be in flight follows the room.
pub fn wanted(recipe: &Recipe, sight: &Sight) -> Option<f64> {
    let auto = matches!(recipe.capture.concurrency, crate::recipe::Concurrency::Auto(_));
    if auto && sight.setting.classes.is_empty() { Some(f64::MAX) } else { sight.in_flight }
}

struct Finder<'a> {
    recipe: &'a Recipe,
    family: Option<&'a Family>,
    sight: &'a Sight,
    model: &'a Model,
    hardware: Hardware,
    now: Scenario,
    base: Outlook,
}

impl Finder<'_> {
    fn lever(&self, kind: Kind, name: &'static str, text: [String; 3], scenario: Scenario) -> Lever {
        let outlook = self.model.outlook(&scenario);
        // Draw by draw nothing but the scenario differs.
        let saves = self.base.hours.zip(outlook.hours).map(|(before, after)| {
            let each = self.base.draws.iter().zip(&outlook.draws).map(|(before, after)| (before - after).max(0.0));
            Span::of((before.middle - after.middle).max(0.0), each)
        });
        let [title, act, cost] = text;
        let saves_tokens = (self.base.tokens.middle - outlook.tokens.middle).max(0.0);
        Lever { kind, name, title, act, cost, saves, left: outlook.hours, saves_tokens, cuts: None, scenario }
    }

    fn with_running(&self, running: f64) -> Scenario {
        Scenario { running: Some(running), ..self.now.clone() }
    }

    /// Requests in flight that the server does not run, or fewer in flight than it would run.
    fn subscription(&self) -> Option<Lever> {
        let sight = self.sight;
        let running = sight.setting.running?;
        let in_flight = sight.in_flight.or(sight.setting.limit)?.max(running);
        let queued = sight.queued.unwrap_or(in_flight - running);
        if queued > running * QUEUE_SHARE && queued >= 4.0 {
            let full = match sight.kv_use {
                Some(used) if used > 0.8 => format!("the KV cache is {:.0}% full", used * 100.0),
                _ => "the server has no room for more".into(),
            };
            let bound = match sight.servers.iter().filter_map(|s| s.max_running).sum::<usize>() as f64 {
                most if most > 0.0 && running >= most * 0.98 => {
                    format!("; the server is started with at most {most:.0} running requests, raise that")
                }
                _ => String::new(),
            };
            let title = format!(
                "over-subscribed: {in_flight:.0} requests are in flight and {running:.0} of them run, {queued:.0} only queue \
                 ({full})"
            );
            let act = format!(
                "set concurrency = \"auto\": it keeps about {:.0} in flight; what saves the hours is room for the {queued:.0} \
                 that wait{bound}",
                running + (running * 0.08).ceil().max(2.0)
            );
            let cost = "nothing; the saving is what it brings if room is made for all of them, see below".into();
            return Some(self.lever(
                Kind::Wrong,
                "over_subscription",
                [title, act, cost],
                self.with_running(in_flight),
            ));
        }
        // Under-subscribed: a fixed number below what the cache has room for.
        let room = sight.room()?;
        let most = sight.servers.iter().filter_map(|s| s.max_running).sum::<usize>() as f64;
        let could = if most > 0.0 { room.min(most) } else { room };
        let fixed = matches!(self.recipe.capture.concurrency, crate::recipe::Concurrency::Fixed(_))
            || !sight.setting.classes.is_empty();
        (fixed && queued < 1.0 && could > in_flight * 1.3).then(|| {
            let title = format!(
                "under-subscribed: {in_flight:.0} requests are in flight and the KV cache has room for about {could:.0}"
            );
            let act = "set concurrency = \"auto\"".to_string();
            self.lever(Kind::Wrong, "under_subscription", [title, act, "nothing".into()], self.with_running(could))
        })
    }

    /// Whether more KV room would be used: something queues, or the cache is full.
    fn wants_room(&self) -> bool {
        self.sight.queued.is_some_and(|n| n >= 1.0)
            || self.sight.kv_use.is_some_and(|used| used > 0.85)
            || self.sight.room().zip(self.sight.setting.limit).is_some_and(|(room, limit)| room < limit)
    }

    /// The scenario of `factor` times the KV room.
    fn room_times(&self, factor: f64) -> Scenario {
        let (running, total) = self.model.running();
        let wanted = wanted(self.recipe, self.sight).unwrap_or(total).max(running);
        self.with_running((running * factor).min(wanted))
    }

    /// Bytes of KV cache a token takes on each GPU.
    fn kv_bytes(&self) -> Option<f64> {
        let server = self.sight.servers.first()?;
        let gpus = server.gpus.unwrap_or(1).max(1) as f64;
        let told = server.kv_bytes_per_token;
        told.or_else(|| {
            let family = self.family?;
            let bytes = if is_fp8(server.kv_dtype.as_deref()) { 1 } else { 2 };
            Some(family.kv_bytes_per_token(bytes) as f64 / if family.kv.replicated { 1.0 } else { gpus })
        })
    }

    fn memory(&self) -> Option<Lever> {
        let server = self.sight.servers.first()?;
        let (fraction, tokens) = (server.memory_fraction?, server.kv_tokens? as f64);
        if fraction >= MEMORY_MOST - 0.01 || !self.wants_room() {
            return None;
        }
        let more = (MEMORY_MOST - fraction) * self.hardware.gpu_bytes / self.kv_bytes()?;
        let factor = (tokens + more) / tokens;
        let flag = if self.sight.engine == "vllm" { "--gpu-memory-utilization" } else { "--mem-fraction-static" };
        let room = self.sight.room().unwrap_or(self.model.running().0);
        let title = format!(
            "more memory for the KV cache: {:.0} requests fit at {fraction:.2} of each GPU, about {:.0} at {MEMORY_MOST}",
            room,
            room * factor
        );
        let act = format!(
            "start the server with {flag} {MEMORY_MOST} ({:.0} GB a GPU assumed, --gpu-gb tells otherwise)",
            self.hardware.gpu_bytes / 1e9
        );
        let cost = "a restart; if it runs out of memory under long prompts, go down in steps of 0.02".into();
        Some(self.lever(Kind::Free, "memory_fraction", [title, act, cost], self.room_times(factor)))
    }

    fn hierarchical(&self) -> Option<Lever> {
        let server = self.sight.servers.first()?;
        let share = self.sight.shared_prefix;
        if self.sight.engine != "sglang" || server.hierarchical_cache == Some(true) || share < 0.02 {
            return None;
        }
        let title = format!(
            "{:.0}% of prompt tokens repeat an earlier prompt's beginning; a full GPU cache forgets them",
            share * 100.0
        );
        let act = "start the server with --enable-hierarchical-cache".into();
        let cost = "host memory, a restart; saves only what is prefilled twice today".into();
        let scenario = Scenario { prompts: 1.0 - share, ..self.now.clone() };
        Some(self.lever(Kind::Free, "hierarchical_cache", [title, act, cost], scenario))
    }

    fn fp8(&self) -> Option<Lever> {
        let server = self.sight.servers.first()?;
        if is_fp8(server.kv_dtype.as_deref()) || !self.wants_room() || self.sight.engine == "llama.cpp" {
            return None;
        }
        let flag = if self.sight.engine == "vllm" { "--kv-cache-dtype fp8" } else { "--kv-cache-dtype fp8_e4m3" };
        let title = "KV cache in fp8: twice the room".into();
        let act = format!("start the server with {flag}");
        let cost =
            "quality: answers are of a slightly other model than the one you serve, unless you serve fp8 KV too; \
                    compare some before you trust it"
                .into();
        Some(self.lever(Kind::Data, "fp8_kv", [title, act, cost], self.room_times(2.0)))
    }

    /// Round caps: the tightest that cuts little, and the next on each side.
    fn caps(&self) -> Vec<Lever> {
        let observed = &self.sight.observed;
        let more: f64 = self.now.groups.iter().map(|g| g.1).sum();
        let cut = |cap: f64| {
            let of = |(g, &(_, more)): (usize, &(f64, f64))| more * self.model.lengths(g).share_above(cap);
            self.now.groups.iter().enumerate().map(of).sum::<f64>() / more.max(1.0)
        };
        let largest = self.now.groups.iter().map(|g| g.0).fold(0.0, f64::max);
        let below: Vec<f64> = CAPS.iter().map(|&c| c as f64).filter(|&c| c < largest).collect();
        let Some(best) = below.iter().position(|&cap| cut(cap) <= MAY_CUT && cut(cap) > 0.0) else { return vec![] };
        let shown = best.saturating_sub(1)..=(best + 1).min(below.len() - 1);
        let lever = |&cap: &f64| {
            let mut scenario = self.now.clone();
            scenario.groups.iter_mut().for_each(|g| g.0 = g.0.min(cap));
            let longer = observed.finished.iter().filter(|f| f.tokens as f64 > cap).count();
            let title = format!("cap answers at {cap:.0} tokens");
            let act = format!("set max_tokens = {cap:.0}, in [capture] and in each class");
            let mut lever = self.lever(Kind::Data, "cap", [title, act, String::new()], scenario);
            lever.cuts = Some(cut(cap));
            lever.cost = format!(
                "cuts {:.1}% of answers ({longer} of {} seen are longer) and {:.1}% of the tokens still to come",
                cut(cap) * 100.0,
                observed.finished.len(),
                lever.saves_tokens * 100.0 / self.still_to_come().max(1.0)
            );
            lever
        };
        below[shown].iter().filter(|&&cap| cut(cap) > 0.0).map(lever).collect()
    }

    fn still_to_come(&self) -> f64 {
        self.base.tokens.middle - self.sight.observed.groups.iter().map(|g| g.tokens as f64).sum::<f64>()
    }

    /// Fewer answers.
    fn samples(&self) -> Vec<Lever> {
        let samples = self.recipe.capture.samples;
        let groups = &self.sight.observed.groups;
        let fewer = |share: f64| {
            let mut scenario = self.now.clone();
            for (group, status) in scenario.groups.iter_mut().zip(groups) {
                let done = status.done as f64;
                group.1 = ((done + group.1) * share - done).max(0.0).min(group.1);
            }
            scenario
        };
        let mut levers = Vec::new();
        if samples > 1 {
            let share = 1.0 / samples as f64;
            let title = format!("one answer to each prompt rather than {samples}");
            let cost = "the data is as broad, but says less of how answers vary".into();
            levers.push(self.lever(Kind::Data, "samples", [title, "set samples = 1".into(), cost], fewer(share)));
        }
        let largest = groups.iter().map(|g| g.wanted / samples.max(1)).max().unwrap_or(0);
        if largest >= 400 {
            let take = round(largest as f64 / 2.0);
            let title = format!("half the prompts of each dataset, at most {take}");
            let cost = "half the data, every dataset still there".into();
            levers.push(self.lever(Kind::Data, "take", [title, format!("set take = {take}"), cost], fewer(0.5)));
        }
        levers
    }

    /// Stopping where the draft head no longer gains from data.
    fn gains(&self) -> Option<Lever> {
        let losses = held_out_losses(&self.recipe.train.out.join("metrics.jsonl"));
        let gain = gain_of_twice(&losses)?;
        let mut scenario = self.now.clone();
        scenario.groups.iter_mut().for_each(|g| g.1 = 0.0);
        (gain < WORTH).then(|| {
            let title = format!(
                "the draft head no longer gains: twice the data would take {:.1}% off its held-out loss",
                (gain * 100.0).max(0.0)
            );
            let act = "stop capturing, train on what is there".into();
            let cost = "the last bit of acceptance length".into();
            self.lever(Kind::Data, "held_out_loss", [title, act, cost], scenario)
        })
    }

    fn replicas(&self) -> Option<Lever> {
        (!self.sight.engine.is_empty()).then(|| {
            let servers = self.sight.servers.len().max(1) as f64;
            let title = format!("one server more ({servers:.0} now)");
            let act = "add its address to capture.servers; the load is shared by free KV room".into();
            let gpus = self.sight.servers.first().and_then(|s| s.gpus).unwrap_or(1);
            let cost = format!("{gpus} more GPU{}", if gpus == 1 { "" } else { "s" });
            let scenario = Scenario { speed: (servers + 1.0) / servers, ..self.now.clone() };
            self.lever(Kind::Hardware, "replicas", [title, act, cost], scenario)
        })
    }
}

fn is_fp8(dtype: Option<&str>) -> bool {
    dtype.is_some_and(|d| d.contains("fp8") || d.contains("float8"))
}

/// Two digits that count.
pub fn round(number: f64) -> usize {
    let scale = 10f64.powf((number.max(1.0).log10().floor() - 1.0).max(0.0));
    ((number / scale).ceil() * scale) as usize
}

/// (steps, held-out loss) of a training run under way or done; empty where there is none.
fn held_out_losses(metrics: &std::path::Path) -> Vec<(f64, f64)> {
    let text = std::fs::read_to_string(metrics).unwrap_or_default();
    let figures = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        Some((value["step"].as_f64()?, value.pointer("/held_out/loss")?.as_f64()?))
    };
    text.lines().filter_map(figures).filter(|(step, _)| *step > 0.0).collect()
}

/// Share of its loss that a head would lose with twice the data, from the slope of its held-out loss over the logarithm
/// of the data in the later half of its run.
fn gain_of_twice(losses: &[(f64, f64)]) -> Option<f64> {
    let &(last, loss) = losses.last()?;
    let late: Vec<(f64, f64)> =
        losses.iter().filter(|l| l.0 * 4.0 >= last).map(|&(step, loss)| (step.log2(), loss)).collect();
    if late.len() < 3 {
        return None;
    }
    let n = late.len() as f64;
    let (mx, my) = late.iter().fold((0.0, 0.0), |(x, y), l| (x + l.0 / n, y + l.1 / n));
    let (xy, xx) = late.iter().fold((0.0, 0.0), |(a, b), l| (a + (l.0 - mx) * (l.1 - my), b + (l.0 - mx) * (l.0 - mx)));
    (xx > 0.0 && loss > 0.0).then(|| -xy / xx / loss)
}

/// One line of a lever for people.
pub fn line(lever: &Lever) -> String {
    let saves = match &lever.saves {
        Some(s) if s.middle >= 1.0 / 60.0 => {
            format!("saves {} ({} to {})", hours(s.middle), hours(s.low), hours(s.high))
        }
        Some(_) => "saves next to nothing".into(),
        None => "saving unknown".into(),
    };
    format!("{}\n     {saves}; {}\n     cost: {}", lever.title, lever.act, lever.cost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gain_is_the_slope_over_doublings() {
        // A tenth off for each doubling, then none.
        let falling: Vec<(f64, f64)> = (0..8).map(|i| (2f64.powi(i), 4.0 - 0.1 * f64::from(i))).collect();
        assert!((gain_of_twice(&falling).unwrap() - 0.1 / 3.3).abs() < 1e-9);
        let flat: Vec<(f64, f64)> = (1..9).map(|i| (f64::from(i) * 100.0, 2.0)).collect();
        assert!(gain_of_twice(&flat).unwrap().abs() < 1e-9);
        assert!(gain_of_twice(&flat[..2]).is_none());
        assert_eq!((round(5499.0), round(43.2), round(7.0), round(0.0)), (5500, 44, 7, 0));
    }
}
