//! eaglet trains EAGLE-3 draft heads.
//!
//! Data flows one way, one folder per stage; ARCHITECTURE.md is the map:
//! recipe -> target -> capture -> plan -> sequences -> features -> draft -> train -> export -> evaluate.
#![recursion_limit = "256"]

pub mod capture;
pub mod draft;
pub mod evaluate;
pub mod export;
pub mod features;
pub mod plan;
pub mod progress;
pub mod recipe;
pub mod sequences;
pub mod signals;
pub mod target;
pub mod train;
