//! Numbers and caps of each dataset that fit a budget, as a recipe.
//!
//! What is cheap goes first: caps that cut few answers, each dataset its own. Then fewer prompts, of every dataset the
//! same share and of none fewer than a floor, so that all stay represented. What is answered already is kept. It is the
//! high end of the 90% interval that must fit, not the estimate.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Serialize;

use super::forecast::{Model, Outlook, Scenario};
use super::levers::{self, CAPS, Kind, Lever, MAY_CUT};
use super::observe::Sight;
use super::{PlanError, Span};
use crate::capture::jobs::{Class, Classes};
use crate::capture::status::hours;
use crate::recipe::{CaptureRecipe, ClassRecipe, Recipe};

/// Answers of a dataset are not brought below this number, nor below this share of what was wanted.
const FLOOR: (f64, f64) = (200.0, 0.05);
/// Shares of answers that the caps may cut, tried in turn.
const CUTS: [f64; 4] = [MAY_CUT / 4.0, MAY_CUT / 2.0, MAY_CUT * 3.0 / 4.0, MAY_CUT];
/// Halvings in the search for the share of prompts.
const HALVINGS: usize = 12;
/// Times the found share is fitted anew, since what is wanted weighs in the forecast.
const REFITS: usize = 6;

/// What a capture may take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// Hours from now.
    Hours(f64),
    /// Output tokens in all, those that are there too.
    Tokens(f64),
}

impl FromStr for Budget {
    type Err = PlanError;

    /// Reads `90min`, `24h`, `2d`, `500ktok`, `60Mtok` or `1.5Gtok`.
    fn from_str(text: &str) -> Result<Self, PlanError> {
        let bad = || PlanError::Budget(text.to_string());
        let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let (number, unit) = text.split_at(at);
        let number: f64 = number.parse().ok().filter(|&n: &f64| n.is_finite() && n > 0.0).ok_or_else(bad)?;
        match unit.trim() {
            "min" => Ok(Self::Hours(number / 60.0)),
            "h" => Ok(Self::Hours(number)),
            "d" => Ok(Self::Hours(number * 24.0)),
            "tok" => Ok(Self::Tokens(number)),
            "ktok" => Ok(Self::Tokens(number * 1e3)),
            "Mtok" => Ok(Self::Tokens(number * 1e6)),
            "Gtok" => Ok(Self::Tokens(number * 1e9)),
            _ => Err(bad()),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hours(n) => f.write_str(&hours(*n)),
            Self::Tokens(n) => write!(f, "{:.1}M tokens", n / 1e6),
        }
    }
}

impl Budget {
    /// What of an outlook counts against the budget, and how much of it there may be.
    fn figures(self, outlook: &Outlook) -> (f64, f64) {
        match self {
            Self::Hours(most) => (outlook.hours.map_or(0.0, |h| h.high), most),
            Self::Tokens(most) => (outlook.tokens.high, most),
        }
    }

    fn holds(self, outlook: &Outlook) -> bool {
        let (high, most) = self.figures(outlook);
        high <= most
    }
}

/// What becomes of one class and dataset.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Part {
    pub class: String,
    pub dataset: String,
    /// Answers, before and with the budget.
    pub wanted: (usize, usize),
    /// Cap on output tokens, before and with the budget.
    pub max_tokens: (usize, usize),
    /// Share of its answers that the cap cuts.
    pub cuts: f64,
}

/// A recipe that fits.
#[derive(Debug, Clone, Serialize)]
pub struct Proposal {
    /// The budget, as hours or tokens.
    pub budget: String,
    /// Nothing has to be given up.
    pub fits_as_is: bool,
    /// What costs nothing would be enough by itself.
    pub free_levers_suffice: bool,
    /// Hours and tokens with the proposed recipe.
    pub hours: Option<Span>,
    pub tokens: Span,
    pub parts: Vec<Part>,
    /// Where the recipe was written.
    pub written: Option<PathBuf>,
    #[serde(skip)]
    pub recipe: Recipe,
}

/// Finds numbers and caps that fit.
///
/// # Errors
/// A time is asked for and no rate is known, or not even the least of every dataset fits.
pub fn propose(
    budget: Budget,
    recipe: &Recipe,
    sight: &Sight,
    model: &Model,
    levers: &[Lever],
) -> Result<Proposal, PlanError> {
    let now = model.as_is();
    let outlook = model.outlook(&now);
    if matches!(budget, Budget::Hours(_)) && outlook.hours.is_none() {
        return Err(PlanError::Nothing(
            "no rate is known yet, so no time can be kept; try again in some minutes".into(),
        ));
    }
    let free = levers.iter().filter(|l| l.kind <= Kind::Free && l.name != "over_subscription");
    let most = levers::wanted(recipe, sight).unwrap_or(model.running().1);
    let free_levers_suffice = budget.holds(&levers::together(model, most, free));
    let fits_as_is = budget.holds(&outlook);
    let (scenario, outlook) = match fits_as_is {
        true => (now.clone(), outlook),
        false => Search { budget, sight, model, now: &now }.run()?,
    };
    let groups = &sight.observed.groups;
    let parts = groups.iter().enumerate().zip(&scenario.groups).zip(&now.groups);
    let parts: Vec<Part> = parts
        .map(|(((at, group), &(cap, more)), &(_, all))| Part {
            class: group.class.clone(),
            dataset: group.dataset.clone(),
            wanted: (group.done + all.round() as usize, group.done + more.round() as usize),
            max_tokens: (group.max_tokens, cap as usize),
            cuts: if cap < group.max_tokens as f64 { model.lengths(at).share_above(cap) } else { 0.0 },
        })
        .collect();
    let mut settled = recipe.clone();
    let odd = levers.iter().any(|l| l.kind == Kind::Wrong);
    if odd || recipe.capture.class.iter().any(|c| c.concurrency.is_some()) {
        settled.capture.concurrency = CaptureRecipe::default().concurrency;
        settled.capture.class.iter_mut().for_each(|c| c.concurrency = None);
    }
    if !fits_as_is {
        settled.capture.class = classes(recipe, &parts);
    }
    let (hours, tokens) = (outlook.hours, outlook.tokens);
    let (budget, written) = (budget.to_string(), None);
    Ok(Proposal { budget, fits_as_is, free_levers_suffice, hours, tokens, parts, written, recipe: settled })
}

struct Search<'a> {
    budget: Budget,
    sight: &'a Sight,
    model: &'a Model,
    now: &'a Scenario,
}

impl Search<'_> {
    fn run(&self) -> Result<(Scenario, Outlook), PlanError> {
        let mut least = None;
        for cut in CUTS {
            let scenario = self.scenario(cut, 1.0);
            let outlook = self.anew(&scenario);
            if self.budget.holds(&outlook) {
                return Ok((scenario, outlook));
            }
        }
        // Every other look takes the model as it is fitted; the last word has one fitted to the numbers found.
        let mut goal = 1.0;
        for _ in 0..REFITS {
            let share = self.share(goal);
            let scenario = self.scenario(MAY_CUT, share);
            let outlook = self.anew(&scenario);
            if self.budget.holds(&outlook) {
                return Ok((scenario, outlook));
            }
            let (high, most) = self.budget.figures(&outlook);
            goal *= most / high * 0.995;
            least = Some(outlook);
            if share == 0.0 {
                break;
            }
        }
        let high = least.map_or(0.0, |l| self.budget.figures(&l).0);
        let high = match self.budget {
            Budget::Hours(_) => Budget::Hours(high),
            Budget::Tokens(_) => Budget::Tokens(high),
        };
        Err(PlanError::TooSmall(format!(
            "{} are too few: {} are needed, with 90% certainty, for what is in the journal and {:.0} answers of each dataset \
             (or {:.0}% of it); a budget of that, fewer datasets or what else shortens it (`eaglet plan` lists it) would do",
            self.budget,
            high,
            FLOOR.0,
            FLOOR.1 * 100.0
        )))
    }

    /// The largest share of prompts that keeps to `goal` times the budget; 0 where none does.
    fn share(&self, goal: f64) -> f64 {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            let (is, most) = self.budget.figures(&self.model.outlook(&self.scenario(MAY_CUT, middle)));
            if is <= most * goal { low = middle } else { high = middle }
        }
        low
    }

    /// Caps that cut at most a share of each dataset's answers, and a share of its prompts.
    fn scenario(&self, cut: f64, share: f64) -> Scenario {
        let groups = self.now.groups.iter().zip(&self.sight.observed.groups).enumerate();
        let groups = groups.map(|(at, (&(cap, more), status))| {
            let (done, all) = (status.done as f64, status.done as f64 + more);
            let lengths = self.model.lengths(at);
            let round = CAPS.iter().map(|&c| c as f64).find(|&c| lengths.share_above(c) <= cut);
            let floor = FLOOR.0.max(FLOOR.1 * all).min(all);
            let target = (share * all).round().max(floor).max(done);
            (round.map_or(cap, |round| round.min(cap)), target - done)
        });
        Scenario { groups: groups.collect(), ..self.now.clone() }
    }

    /// What a plan of the new recipe will say.
    fn anew(&self, scenario: &Scenario) -> Outlook {
        let mut observed = self.sight.observed.clone();
        for (group, &(cap, more)) in observed.groups.iter_mut().zip(&scenario.groups) {
            group.wanted = group.done + more.round() as usize;
            group.max_tokens = cap as usize;
        }
        let model = Model::fit(&observed, &self.sight.setting, super::forecast::DRAWS);
        model.outlook(&model.as_is())
    }
}

/// One class for each class and dataset there was, in the same order, so that each prompt falls where it did.
fn classes(recipe: &Recipe, parts: &[Part]) -> Vec<ClassRecipe> {
    let settled = Classes::new(&recipe.capture);
    let of = |part: &Part| {
        let at = settled.0.iter().position(|c| c.name == part.class && c.takes(&part.dataset));
        at.unwrap_or(settled.0.len() - 1)
    };
    let mut parts: Vec<(usize, &Part)> = parts.iter().map(|part| (of(part), part)).collect();
    parts.sort_by_key(|(at, _)| *at);
    let class = |(at, part): (usize, &Part)| {
        let before = recipe.capture.class.get(at).cloned().unwrap_or_default();
        let (all, wanted) = part.wanted;
        let take = (wanted < all).then(|| prompts(&settled.0[at], wanted, recipe.capture.held_out_share));
        ClassRecipe {
            // Its name is what the answers in the journal are found by.
            name: if part.class.is_empty() { part.dataset.clone() } else { part.class.clone() },
            datasets: vec![glob::Pattern::escape(&part.dataset)],
            max_tokens: Some(part.max_tokens.1),
            take: take.or(before.take),
            concurrency: None,
            ..before
        }
    };
    parts.into_iter().map(class).collect()
}

/// Prompts that come to so many answers.
fn prompts(class: &Class, answers: usize, held_out_share: f64) -> usize {
    let each = class.answers(1000, held_out_share) as f64 / 1000.0;
    ((answers as f64 / each) as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_read() {
        let read = |text: &str| text.parse::<Budget>();
        assert_eq!(read("24h").unwrap(), Budget::Hours(24.0));
        assert_eq!(read("90min").unwrap(), Budget::Hours(1.5));
        assert_eq!(read("1.5d").unwrap(), Budget::Hours(36.0));
        assert_eq!(read("60Mtok").unwrap(), Budget::Tokens(60e6));
        for bad in ["", "24", "h", "0h", "-3h", "24 parsecs", "1e999h", "..h", "24H"] {
            assert!(matches!(read(bad), Err(PlanError::Budget(_))), "{bad}");
        }
    }
}
