//! Evaluation: how many tokens a verification yields.
//!
//! In: a target, a draft head, held-out sequences. Out: acceptance lengths. Open `offline.rs` for the teacher-forced
//! figure over captured sequences, `decode.rs` for real speculative decoding, `verify.rs` for the rule that keeps or
//! refuses a draft, `report.rs` for the tables.

pub mod decode;
pub mod verify;
