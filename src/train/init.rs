//! How a head begins: at random from the seed, its own head from the target's rows.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::draft::config::DraftConfig;
use crate::draft::head::{HeadTensors, HostArray};
use crate::recipe::HeadInit;

/// What the target lends a new head.
pub struct Lent<'a> {
    /// The target's head rows of the draft vocabulary, `[draft_vocab, hidden]`.
    pub head_rows: &'a [f32],
    /// Its final norm's gain, `[hidden]`: the rows expect their input scaled by it.
    pub norm: &'a [f32],
}

/// A new head's weights.
///
/// Products are uniform in `±1/sqrt(in)`, gains one. With [`HeadInit::Target`] and a head as wide as the target,
/// `lm_head` and the output norm are the target's own.
pub fn new_head(config: &DraftConfig, init: HeadInit, lent: &Lent, seed: u64) -> HeadTensors {
    let same_width = config.hidden_size == config.target_hidden_size;
    let shapes = config.tensor_shapes();
    let tensors = shapes.into_iter().enumerate().map(|(i, (name, shape))| {
        // A stream a weight: adding an optional weight leaves the others as they were.
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(1_000_000 + i as u64);
        let size: usize = shape.iter().product();
        let data = match (name.as_str(), init) {
            ("lm_head.weight", HeadInit::Target) if same_width => lent.head_rows.to_vec(),
            ("norm.weight", HeadInit::Target) if same_width => lent.norm.to_vec(),
            _ if shape.len() == 1 => vec![1.0; size],
            _ => {
                let bound = 1.0 / (shape[1] as f32).sqrt();
                (0..size).map(|_| rng.random_range(-bound..bound)).collect()
            }
        };
        (name, HostArray { shape, data })
    });
    tensors.collect()
}
