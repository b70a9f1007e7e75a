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
    /// One of its layers, for [`LayerInit::Target`].
    pub layer: Option<LentLayer>,
}

/// A target layer's weights on the host, row-major: q `[heads * head_dim, hidden]` and so on.
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
        let random = |rng: &mut ChaCha8Rng, size: usize, columns: usize| -> Vec<f32> {
            let bound = 1.0 / (columns as f32).sqrt();
            (0..size).map(|_| rng.random_range(-bound..bound)).collect()
        };
        if let Some(layer) = &lent.layer {
            // The embedding's half at random beside the layer's own weights for the stream.
            let beside = |rng: &mut ChaCha8Rng, own: &[f32]| -> Vec<f32> {
                let half = shape[1] / 2;
                let own_rms = (own.iter().map(|x| x * x).sum::<f32>() / own.len() as f32).sqrt();
                let scale: f32 = std::env::var("EMB_SCALE").ok().and_then(|x| x.parse().ok()).unwrap_or(0.5);
                own.chunks_exact(half)
                    .flat_map(|row| {
                        let b = own_rms * 1.7 * scale;
                        let mut full: Vec<f32> = (0..half).map(|_| rng.random_range(-b..b)).collect();
                        full.extend(row);
                        full
                    })
                    .collect()
            };
            let data = match name.as_str() {
                "midlayer.self_attn.q_proj.weight" => Some(beside(&mut rng, &layer.q)),
                "midlayer.self_attn.k_proj.weight" => Some(beside(&mut rng, &layer.k)),
                "midlayer.self_attn.v_proj.weight" => Some(beside(&mut rng, &layer.v)),
                "midlayer.self_attn.o_proj.weight" => Some(layer.o.clone()),
                "midlayer.mlp.gate_proj.weight" => Some(layer.gate.clone()),
                "midlayer.mlp.up_proj.weight" => Some(layer.up.clone()),
                "midlayer.mlp.down_proj.weight" => Some(layer.down.clone()),
                "midlayer.hidden_norm.weight" => Some(layer.input_norm.clone()),
                "midlayer.post_attention_layernorm.weight" => Some(layer.post_norm.clone()),
                "fc.weight" if std::env::var("FC_ID").is_ok() => {
                    let scale: f32 = std::env::var("FC_ID").unwrap().parse().unwrap();
                    let noise: f32 = std::env::var("FC_NOISE").ok().and_then(|x| x.parse().ok()).unwrap_or(0.1);
                    let mut d: Vec<f32> = random(&mut rng, size, shape[1]).iter().map(|x| x * noise).collect();
                    for r in 0..shape[0] {
                        d[r * shape[1] + shape[1] - shape[0] + r] += scale;
                    }
                    Some(d)
                }
                _ => None,
            };
            if let Some(data) = data {
                return (name, HostArray { shape, data });
            }
        }
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
