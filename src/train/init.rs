//! How a head begins: from what the target can lend, else at random from the seed.
//!
//! A head trained on a laptop sees some 10^5 tokens, far too few to learn a language from. Its target has learned it:
//! the rows of its head, the gain before them and its last layer are taken over, and `fc` at first hands the highest
//! fused layer through, which is nearly the stream that layer is used to. On SmolLM2 and one pass over 120k tokens that
//! is the difference between 1.23 and 1.32 tokens a verification.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::draft::config::DraftConfig;
use crate::draft::head::{HeadTensors, HostArray};
use crate::recipe::DraftInit;

/// What the target lends a new head.
pub struct Lent<'a> {
    /// The target's head rows of the draft vocabulary, `[draft_vocab, hidden]`.
    pub head_rows: &'a [f32],
    /// Its final norm's gain, `[hidden]`: the rows expect their input scaled by it.
    pub norm: &'a [f32],
    /// Its last layer, where its shape is the head's.
    pub layer: Option<LentLayer>,
}

/// A target layer's weights on the host, row-major, `[out, in]` each.
#[derive(Debug, Clone)]
pub struct LentLayer {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub o: Vec<f32>,
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    pub down: Vec<f32>,
    pub input_norm: Vec<f32>,
    pub post_norm: Vec<f32>,
}

/// A new head's weights; what the target does not lend is uniform in `±1/sqrt(in)`, gains are one.
///
/// The lent `q`, `k` and `v` act on the stream; beside them the embedding's half, which no layer of the target has,
/// begins at random and half as large.
pub fn new_head(config: &DraftConfig, init: DraftInit, lent: &Lent, seed: u64) -> HeadTensors {
    let from_target = init == DraftInit::Target && config.hidden_size == config.target_hidden_size;
    let layer = lent.layer.as_ref().filter(|_| from_target);
    let tensors = config.tensor_shapes().into_iter().enumerate().map(|(i, (name, shape))| {
        // A stream a weight: adding an optional weight leaves the others as they were.
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(1_000_000 + i as u64);
        let mut random =
            |size: usize, bound: f32| -> Vec<f32> { (0..size).map(|_| rng.random_range(-bound..bound)).collect() };
        let size: usize = shape.iter().product();
        let columns = shape[shape.len() - 1];
        let data = match (name.as_str(), layer) {
            ("lm_head.weight", _) if from_target => lent.head_rows.to_vec(),
            ("norm.weight", _) if from_target => lent.norm.to_vec(),
            ("midlayer.self_attn.q_proj.weight", Some(layer)) => beside_embedding(&layer.q, columns, &mut random),
            ("midlayer.self_attn.k_proj.weight", Some(layer)) => beside_embedding(&layer.k, columns, &mut random),
            ("midlayer.self_attn.v_proj.weight", Some(layer)) => beside_embedding(&layer.v, columns, &mut random),
            ("midlayer.self_attn.o_proj.weight", Some(layer)) => layer.o.clone(),
            ("midlayer.mlp.gate_proj.weight", Some(layer)) => layer.gate.clone(),
            ("midlayer.mlp.up_proj.weight", Some(layer)) => layer.up.clone(),
            ("midlayer.mlp.down_proj.weight", Some(layer)) => layer.down.clone(),
            ("midlayer.hidden_norm.weight", Some(layer)) => layer.input_norm.clone(),
            ("midlayer.post_attention_layernorm.weight", Some(layer)) => layer.post_norm.clone(),
            ("fc.weight", Some(_)) => {
                let mut fc = random(size, 0.1 / (columns as f32).sqrt());
                let (rows, highest) = (shape[0], columns - shape[0]);
                (0..rows).for_each(|row| fc[row * columns + highest + row] += 1.0);
                fc
            }
            _ if shape.len() == 1 => vec![1.0; size],
            _ => random(size, 1.0 / (columns as f32).sqrt()),
        };
        (name, HostArray { shape, data })
    });
    tensors.collect()
}

/// Rows `[embedding | own]` of width `columns`, the embedding's half uniform with half the deviation of the own one.
fn beside_embedding(own: &[f32], columns: usize, random: &mut impl FnMut(usize, f32) -> Vec<f32>) -> Vec<f32> {
    let deviation = (own.iter().map(|x| x * x).sum::<f32>() / own.len() as f32).sqrt();
    // A uniform distribution in ±b deviates by b / sqrt(3).
    let bound = 0.5 * deviation * 3f32.sqrt();
    own.chunks_exact(columns / 2).flat_map(|row| [random(columns / 2, bound), row.to_vec()].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> DraftConfig {
        DraftConfig {
            hidden_size: 4,
            target_hidden_size: 4,
            intermediate_size: 6,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim: 2,
            vocab_size: 9,
            draft_vocab_size: 5,
            aux_layers: vec![1, 2, 3],
            ..DraftConfig::default()
        }
    }

    fn layer() -> LentLayer {
        let of = |rows: usize, columns: usize, value: f32| vec![value; rows * columns];
        LentLayer {
            q: of(4, 4, 1.0),
            k: of(2, 4, 2.0),
            v: of(2, 4, 3.0),
            o: of(4, 4, 4.0),
            gate: of(6, 4, 5.0),
            up: of(6, 4, 6.0),
            down: of(4, 6, 7.0),
            input_norm: of(4, 1, 8.0),
            post_norm: of(4, 1, 9.0),
        }
    }

    #[test]
    fn the_target_lends_its_layer_and_fc_hands_the_highest_one_through() {
        let lent = Lent { head_rows: &[0.5; 20], norm: &[2.0; 4], layer: Some(layer()) };
        let head = new_head(&config(), DraftInit::Target, &lent, 1);
        let shapes = config().tensor_shapes();
        for (name, array) in &head {
            assert_eq!(array.data.len(), shapes[name].iter().product::<usize>(), "{name}");
        }
        let k = &head["midlayer.self_attn.k_proj.weight"].data;
        assert_eq!(k[4..8], [2.0; 4]);
        assert!(k[..4].iter().all(|x| x.abs() < 2.0));
        let fc = &head["fc.weight"].data;
        assert!((fc[8] - 1.0).abs() < 0.1 && fc[0].abs() < 0.1 && fc[9].abs() < 0.1);
        assert_eq!(head["norm.weight"].data, [2.0; 4]);
        assert_eq!(head["midlayer.input_layernorm.weight"].data, [1.0; 4]);
    }

    #[test]
    fn the_seed_decides_and_nothing_is_lent_unasked() {
        let lent = Lent { head_rows: &[0.5; 20], norm: &[2.0; 4], layer: Some(layer()) };
        let random = |seed| new_head(&config(), DraftInit::Random, &lent, seed);
        assert_eq!(random(1), random(1));
        assert_ne!(random(1)["fc.weight"], random(2)["fc.weight"]);
        assert_eq!(random(1)["norm.weight"].data, [1.0; 4]);
        assert_ne!(random(1)["midlayer.self_attn.o_proj.weight"].data, [4.0; 16]);
    }
}
