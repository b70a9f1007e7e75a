//! Plan: how long a capture takes, from what it has done so far, and what would make it shorter.
//!
//! In: a recipe and the folder of a capture that is under way, stopped or done. Out: a [`report::Plan`]: statistics of
//! lengths, tokens and hours with 90% intervals, levers with what each saves and costs, and, for a budget, a recipe.
//! Open `observe.rs` (what is read), then `survival.rs` (lengths, of answers in flight too), `forecast.rs` (hours),
//! `levers.rs` and `budget.rs` (what to change), `report.rs` (all of it, and as text), `page.rs` (as HTML). `simulate.rs`
//! is the server that the end of a run, and the tests, are played on.

pub mod budget;
pub mod forecast;
pub mod levers;
pub mod observe;
pub mod page;
pub mod report;
pub mod simulate;
pub mod survival;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// An estimate with its 90% interval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Span {
    pub low: f64,
    pub middle: f64,
    pub high: f64,
}

impl Span {
    /// The interval between the 5th and the 95th of a hundred draws; it always holds the estimate.
    pub fn of(middle: f64, draws: impl Iterator<Item = f64>) -> Self {
        let mut draws: Vec<f64> = draws.collect();
        draws.sort_by(f64::total_cmp);
        let at = |share: f64| draws.get(((draws.len() as f64 - 1.0) * share).round() as usize).copied();
        Self { low: at(0.05).unwrap_or(middle).min(middle), middle, high: at(0.95).unwrap_or(middle).max(middle) }
    }
}

/// How the requests are sent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Setting {
    /// Requests in flight at most, where that is known.
    pub limit: Option<f64>,
    /// Requests that run at the servers; those beyond it queue.
    pub running: Option<f64>,
    /// Requests in flight of each class that has a number of its own.
    pub classes: BTreeMap<String, usize>,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A file of the capture that cannot be read.
    #[error(transparent)]
    Capture(#[from] crate::capture::CaptureError),
    /// Not enough is known.
    #[error("{0}")]
    Nothing(String),
    /// A budget that is neither time nor tokens.
    #[error("`{0}` is no budget; write it like `24h`, `90min`, `60Mtok` or `500ktok`")]
    Budget(String),
    /// No sample of the datasets fits.
    #[error("{0}")]
    TooSmall(String),
}
