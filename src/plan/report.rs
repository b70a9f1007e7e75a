//! The plan itself: what is known, what is to be expected, what could be changed.

use serde::Serialize;

use super::budget::{self, Budget, Proposal};
use super::forecast::{DRAWS, Model};
use super::levers::{self, Hardware, Lever};
use super::observe::Sight;
use super::{PlanError, Span};
use crate::capture::reasoning::Marks;
use crate::capture::status::{Finished, hours};
use crate::recipe::Recipe;
use crate::target::family::Family;

/// A class's answers without reasoning say something from this many on.
const ENOUGH: usize = 16;
/// This share of answers cut by their cap is worth a word.
const MANY_CUT: f64 = 0.05;
/// Slots of hidden states a token has: three fused layers and the last.
const SLOTS: usize = 4;

/// Figures of the answers that are there.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Lengths {
    pub n: usize,
    /// Output tokens.
    pub mean: f64,
    pub median: f64,
    pub deviation: f64,
    pub p90: f64,
    pub p99: f64,
    pub longest: usize,
    /// Share cut by the cap.
    pub capped: f64,
    /// Share that carries reasoning.
    pub reasoned: f64,
    /// Answers by power of two: `[i]` counts those of `2^i` to `2^(i+1) - 1` tokens.
    pub histogram: Vec<usize>,
}

/// One class and dataset.
#[derive(Debug, Clone, Serialize)]
pub struct Group {
    pub class: String,
    pub dataset: String,
    pub done: usize,
    pub wanted: usize,
    pub max_tokens: usize,
    pub lengths: Lengths,
    /// Mean to expect of further answers, with those in flight counted as longer than they look.
    pub expected: f64,
    /// Output tokens of this group when all is done.
    pub tokens: Span,
    /// Hours of the servers' time it still takes.
    pub hours: Option<Span>,
}

/// How the servers are.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Servers {
    pub engine: String,
    pub in_flight: Option<f64>,
    pub running: Option<f64>,
    pub queued: Option<f64>,
    pub kv_use: Option<f64>,
    pub kv_tokens: Option<f64>,
    /// Requests the KV cache has room for at the lengths seen.
    pub room: Option<f64>,
}

/// What hidden states of all sequences take.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Disk {
    pub bytes_per_token: usize,
    pub bytes: Span,
}

/// All of it.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    pub done: usize,
    pub wanted: usize,
    pub groups: Vec<Group>,
    pub lengths: Lengths,
    /// Output tokens when all is done.
    pub tokens: Span,
    /// Hours still to go; none where the rate is unknown.
    pub hours: Option<Span>,
    /// Output tokens a second that the time left comes to.
    pub tokens_per_s: Option<f64>,
    /// Answers a minute so far, and the hours left if one counts only those.
    pub answers_per_min: Option<f64>,
    pub plain_hours: Option<f64>,
    pub servers: Servers,
    pub warnings: Vec<String>,
    pub levers: Vec<Lever>,
    /// Hours with the levers that cost nothing and the tightest cap that cuts little.
    pub together: Option<Span>,
    pub budget: Option<Proposal>,
    pub disk: Option<Disk>,
    /// Hours left of each draw of the forecast, ascending: what the interval is read from.
    #[serde(skip)]
    pub draws: Vec<f64>,
}

/// Makes the plan of what was seen.
///
/// # Errors
/// When there is nothing to plan from, or the budget cannot be kept.
pub fn plan(
    recipe: &Recipe,
    family: Option<&Family>,
    marks: &Marks,
    sight: &Sight,
    hardware: Hardware,
    budget: Option<Budget>,
) -> Result<Plan, PlanError> {
    let observed = &sight.observed;
    if observed.finished.is_empty() {
        return Err(PlanError::Nothing("no answer is there yet".into()));
    }
    let model = Model::fit(observed, &sight.setting, DRAWS);
    let outlook = model.outlook(&model.as_is());
    let found = levers::find(recipe, family, sight, &model, hardware);
    let of = |at: usize| observed.finished.iter().filter(move |f| f.group == at);
    let groups: Vec<Group> = observed
        .groups
        .iter()
        .zip(&outlook.groups)
        .enumerate()
        .map(|(at, (group, (tokens, hours)))| Group {
            class: group.class.clone(),
            dataset: group.dataset.clone(),
            done: group.done,
            wanted: group.wanted,
            max_tokens: group.max_tokens,
            lengths: lengths(of(at)),
            expected: model.lengths(at).mean(group.max_tokens as f64),
            tokens: *tokens,
            hours: *hours,
        })
        .collect();
    let (done, wanted) = groups.iter().fold((0, 0), |(d, w), g| (d + g.done, w + g.wanted.max(g.done)));
    let made = groups.iter().map(|g| g.lengths.mean * g.lengths.n as f64).sum::<f64>();
    let seconds = model.spent_s;
    let answers_per_min = (seconds > 0.0).then(|| observed.finished.len() as f64 * 60.0 / seconds);
    // Over-subscription brings nothing of itself: what it saves comes from room.
    let cap = found.iter().find(|l| l.cuts.is_some_and(|share| share <= levers::MAY_CUT));
    let chosen = found.iter().filter(|l| l.kind <= levers::Kind::Free && l.name != "over_subscription").chain(cap);
    let most = levers::wanted(recipe, sight).unwrap_or(model.running().1);
    let together = (!found.is_empty()).then(|| levers::together(&model, most, chosen).hours).flatten();
    let mut draws = outlook.draws;
    draws.sort_by(f64::total_cmp);
    let budget = budget.map(|budget| budget::propose(budget, recipe, sight, &model, &found)).transpose()?;
    let prompts = observed.finished.iter().map(|f| f.prompt_tokens as f64).sum::<f64>() / done.max(1) as f64;
    let hidden = family.map(|f| f.hidden_size).or_else(|| hidden_of(recipe));
    let disk = hidden.map(|hidden| {
        let bytes_per_token = SLOTS * hidden * 2;
        let all = |tokens: f64| (tokens + prompts * wanted as f64) * bytes_per_token as f64;
        let t = outlook.tokens;
        Disk { bytes_per_token, bytes: Span { low: all(t.low), middle: all(t.middle), high: all(t.high) } }
    });
    let lengths = lengths(observed.finished.iter());
    Ok(Plan {
        done,
        wanted,
        warnings: warnings(recipe, marks, sight, &lengths, &groups),
        groups,
        lengths,
        tokens: outlook.tokens,
        hours: outlook.hours,
        tokens_per_s: outlook
            .hours
            .filter(|h| h.middle > 0.0)
            .map(|h| (outlook.tokens.middle - made) / h.middle / 3600.0),
        answers_per_min,
        plain_hours: answers_per_min.map(|rate| wanted.saturating_sub(done) as f64 / rate / 60.0),
        servers: Servers {
            engine: sight.engine.clone(),
            in_flight: sight.in_flight,
            running: sight.setting.running,
            queued: sight.queued,
            kv_use: sight.kv_use,
            kv_tokens: sight.kv_tokens(),
            room: sight.room(),
        },
        levers: found,
        draws,
        together,
        budget,
        disk,
    })
}

fn lengths<'a>(finished: impl Iterator<Item = &'a Finished>) -> Lengths {
    let finished: Vec<&Finished> = finished.collect();
    let n = finished.len();
    if n == 0 {
        return Lengths::default();
    }
    let mut tokens: Vec<usize> = finished.iter().map(|f| f.tokens).collect();
    tokens.sort_unstable();
    let mean = tokens.iter().sum::<usize>() as f64 / n as f64;
    let spread = tokens.iter().map(|&t| (t as f64 - mean).powi(2)).sum::<f64>() / (n.max(2) - 1) as f64;
    let at = |share: f64| tokens[((n - 1) as f64 * share).round() as usize] as f64;
    let share = |is: fn(&Finished) -> bool| finished.iter().filter(|f| is(f)).count() as f64 / n as f64;
    let mut histogram = vec![0; tokens[n - 1].max(1).ilog2() as usize + 1];
    tokens.iter().for_each(|&t| histogram[t.max(1).ilog2() as usize] += 1);
    Lengths {
        n,
        mean,
        median: (tokens[(n - 1) / 2] + tokens[n / 2]) as f64 / 2.0,
        deviation: spread.sqrt(),
        p90: at(0.9),
        p99: at(0.99),
        longest: tokens[n - 1],
        capped: share(|f| f.capped),
        reasoned: share(|f| f.reasoned),
        histogram,
    }
}

/// The hidden size in the target's own config, where that is here.
fn hidden_of(recipe: &Recipe) -> Option<usize> {
    let text = std::fs::read_to_string(recipe.target.path.join("config.json")).ok()?;
    let json: serde_json::Value = serde_json::from_str(&text).ok()?;
    let size = json.get("hidden_size").or_else(|| json.pointer("/text_config/hidden_size"))?;
    size.as_u64().map(|n| n as usize)
}

fn warnings(recipe: &Recipe, marks: &Marks, sight: &Sight, all: &Lengths, groups: &[Group]) -> Vec<String> {
    let mut warnings = Vec::new();
    let thinks = marks.reasoning.is_some() && recipe.capture.thinking != crate::recipe::Thinking::Off;
    if thinks && all.n >= ENOUGH && all.reasoned == 0.0 {
        warnings.push(format!(
            "none of {} answers carries reasoning, though the target thinks: set capture.thinking and \
             capture.reasoning = \"required\" before more is captured",
            all.n
        ));
    }
    for group in groups.iter().filter(|g| g.lengths.n >= ENOUGH && g.lengths.capped > MANY_CUT) {
        warnings.push(format!(
            "{}: {:.0}% of answers are cut at {} tokens",
            group.dataset,
            group.lengths.capped * 100.0,
            group.max_tokens
        ));
    }
    if sight.failed > 0 {
        warnings.push(format!("{} prompts were refused by the servers, see failed.jsonl", sight.failed));
    }
    if sight.duplicates > 0 {
        warnings.push(format!("{} prompts are like another and are asked once", sight.duplicates));
    }
    warnings
}

pub(super) fn between(span: &Span, show: fn(f64) -> String) -> String {
    format!("{} ({} to {})", show(span.middle), show(span.low), show(span.high))
}

pub(super) fn tokens(n: f64) -> String {
    match n {
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n if n >= 1e4 => format!("{:.0}k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

pub(super) fn bytes(n: f64) -> String {
    match n {
        n if n >= 1e12 => format!("{:.1} TB", n / 1e12),
        n if n >= 1e9 => format!("{:.1} GB", n / 1e9),
        n => format!("{:.0} MB", n / 1e6),
    }
}

/// What a budget asks to be given up.
pub(super) fn in_budget(proposal: &Proposal) -> String {
    let Proposal { budget, .. } = proposal;
    let mut text = match proposal.fits_as_is {
        true => format!("\nA budget of {budget} is kept as it stands.\n"),
        false => format!("\nTo keep a budget of {budget} with 90% certainty, give up:\n"),
    };
    let width = proposal.parts.iter().map(|p| p.dataset.len()).max().unwrap_or(0);
    for part in proposal.parts.iter().filter(|_| !proposal.fits_as_is) {
        let fewer = part.wanted.0 - part.wanted.1;
        let cap = match part.max_tokens {
            (before, now) if now < before => {
                format!("cap {now} rather than {before}, which cuts {:.1}% of its answers", part.cuts * 100.0)
            }
            (same, _) => format!("cap {same} as before"),
        };
        text += &format!(
            "{:width$}  {fewer} of {} answers ({:.0}%); {cap}\n",
            part.dataset,
            part.wanted.0,
            fewer as f64 * 100.0 / part.wanted.0.max(1) as f64
        );
    }
    if !proposal.fits_as_is {
        let left = proposal.hours.as_ref().map_or(String::new(), |h| format!(", {} left", between(h, hours)));
        text += &format!("with that {} tokens in all{left}\n", between(&proposal.tokens, tokens));
        if proposal.free_levers_suffice {
            text += "What costs nothing, above, would be enough to give up nothing of this.\n";
        }
    }
    if let Some(path) = &proposal.written {
        text += &format!("The recipe is {}; stop the capture and go on with it, nothing is lost.\n", path.display());
    }
    text
}

impl Plan {
    /// The plan for people.
    pub fn text(&self) -> String {
        let mut text = format!("{} of {} answers are there.\n", self.done, self.wanted);
        text += &format!("tokens in all   {}\n", between(&self.tokens, tokens));
        if let Some(left) = &self.hours {
            let rate = self.tokens_per_s.map_or(String::new(), |r| format!(", at {r:.0} output tokens/s"));
            text += &format!("time left       {} with 90% certainty{rate}\n", between(left, hours));
        }
        if let (Some(rate), Some(plain)) = (self.answers_per_min, self.plain_hours) {
            text += &format!("                {} by answers a minute alone ({rate:.0})\n", hours(plain));
        }
        let width = self.groups.iter().map(|g| g.dataset.len()).max().unwrap_or(0).max(7);
        text += &format!(
            "\n{:width$} {:>6} {:>7} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6}  {:<22} left\n",
            "dataset", "done", "wanted", "mean", "expect", "median", "dev", "p90", "p99", "at cap", "tokens"
        );
        for g in &self.groups {
            let l = &g.lengths;
            text += &format!(
                "{:width$} {:>6} {:>7} {:>6.0} {:>6.0} {:>6.0} {:>6.0} {:>6.0} {:>6.0} {:>5.1}%  {:<22} {}\n",
                g.dataset,
                g.done,
                g.wanted,
                l.mean,
                g.expected,
                l.median,
                l.deviation,
                l.p90,
                l.p99,
                l.capped * 100.0,
                between(&g.tokens, tokens),
                g.hours.as_ref().map_or("unknown".into(), |h| between(h, hours)),
            );
        }
        let l = &self.lengths;
        text += &format!(
            "all: n {}, mean {:.0}, median {:.0}, deviation {:.0}, p90 {:.0}, p99 {:.0}, longest {}, {:.1}% at the cap, \
             {:.0}% with reasoning\n\n",
            l.n,
            l.mean,
            l.median,
            l.deviation,
            l.p90,
            l.p99,
            l.longest,
            l.capped * 100.0,
            l.reasoned * 100.0
        );
        let most = l.histogram.iter().copied().max().unwrap_or(0).max(1);
        for (power, &n) in l.histogram.iter().enumerate().filter(|(_, n)| **n > 0) {
            text += &format!("{:>7} {:<40} {n}\n", 1usize << power, "█".repeat((n * 40).div_ceil(most)));
        }
        self.warnings.iter().for_each(|w| text += &format!("\nwarning: {w}"));
        if !self.levers.is_empty() {
            text += "\nWhat would shorten it:\n";
            for (at, lever) in self.levers.iter().enumerate() {
                text += &format!("{:>3}. {}\n", at + 1, levers::line(lever));
            }
        }
        if let Some(left) = &self.together {
            text +=
                &format!("what costs nothing, and the cap that cuts little, together: {} left\n", between(left, hours));
        }
        if let Some(proposal) = &self.budget {
            text += &in_budget(proposal);
        }
        if let Some(disk) = &self.disk {
            text += &format!(
                "\nHidden states of all of it would take {} ({} bytes a token).\n",
                between(&disk.bytes, bytes),
                disk.bytes_per_token
            );
        }
        text
    }
}
