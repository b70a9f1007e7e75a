//! The draft head and its training-time-test step.
//!
//! In: packed documents with the target's states. Out: the loss, its gradients and each step's figures.
//! Open `head.rs` for the layer, `ttt.rs` for the unroll, `attention.rs` and `loss.rs` for the two pieces that bring
//! their own gradient, `vocab.rs` for the draft vocabulary, `config.rs` for the shape.

pub mod acceptance;
pub mod attention;
pub mod config;
pub mod head;
pub mod loss;
pub mod ttt;
pub mod vocab;
