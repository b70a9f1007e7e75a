//! eaglet trains EAGLE-3 draft heads.
//!
//! Data flows one way, one folder per stage; ARCHITECTURE.md is the map:
//! recipe -> target -> capture -> sequences -> features -> draft -> train -> export -> evaluate.
#![recursion_limit = "256"]

pub mod recipe;
pub mod target;
pub mod sequences;
pub mod capture;
pub mod features;
pub mod draft;
pub mod train;
pub mod export;
pub mod evaluate;
