//! Evaluation: how many tokens a verification yields.
//!
//! In: a target, a draft head, held-out prompts. Out: acceptance lengths. Open `decode.rs` for speculative decoding,
//! `verify.rs` for the rule that keeps or refuses a draft, `report.rs` for the measurement. The offline figure over
//! captured sequences is `train::HeldOut`, which training evaluates itself by.

pub mod decode;
pub mod report;
pub mod verify;
