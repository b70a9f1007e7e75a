//! Training: packed documents through TTT steps, AdamW, checkpoints.
//!
//! In: documents with their target's states, a [`Teacher`], a recipe. Out: a run folder with checkpoints,
//! metrics.jsonl and the trained head. Open `trainer.rs` for the loop from top to bottom, `pack.rs` for what goes into
//! which step, `checkpoint.rs` for what survives, `optimizer.rs` and `schedule.rs` for the update, `init.rs` for how
//! a head begins.

pub mod checkpoint;
pub mod init;
pub mod metrics;
pub mod optimizer;
pub mod pack;
pub mod schedule;
pub mod trainer;

pub use trainer::{HeldOut, Outcome, TrainError, Trainer};
