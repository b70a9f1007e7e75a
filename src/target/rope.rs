//! Rotary position embedding (RoFormer, arXiv 2104.09864) in the rotate-half form of the Llama family, with the
//! frequency scalings that checkpoints ask for.

use super::{Rope, RopeScaling};
use burn::tensor::{Device, Tensor, TensorData};
use std::f64::consts::PI;

/// Cosines and sines of every position up to a limit; positions beyond it are computed on demand.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// One frequency for each pair of channels, `[head_dim / 2]`.
    inv_freq: Vec<f32>,
    /// What cosines and sines are multiplied by (1 but for YaRN).
    attention_factor: f32,
    /// `[positions, head_dim / 2]`, row-major.
    cos: Vec<f32>,
    sin: Vec<f32>,
    device: Device,
}

impl RopeTable {
    /// Tables for `max_positions` positions of heads `head_dim` wide (`head_dim` even).
    pub fn new(rope: &Rope, head_dim: usize, max_positions: usize, device: &Device) -> Self {
        let inv_freq: Vec<f32> = inverse_frequencies(rope, head_dim).into_iter().map(|f| f as f32).collect();
        let attention_factor = attention_factor(&rope.scaling) as f32;
        let mut table = Self { inv_freq, attention_factor, cos: vec![], sin: vec![], device: device.clone() };
        let half = table.inv_freq.len();
        let (mut cos, mut sin) = (Vec::with_capacity(max_positions * half), Vec::with_capacity(max_positions * half));
        for position in 0..max_positions {
            for channel in 0..half {
                let (c, s) = table.at(position, channel);
                cos.push(c);
                sin.push(s);
            }
        }
        (table.cos, table.sin) = (cos, sin);
        table
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.inv_freq.len() * 2
    }

    /// The rows [`rotate`] takes for these positions: `(cos, sin)`, each `[positions.len(), head_dim]`. The first half
    /// of `sin` carries the minus sign of the rotation. Any position is valid.
    pub fn rows(&self, positions: &[usize]) -> (Tensor<2>, Tensor<2>) {
        let (cos, sin) = self.host_rows(positions);
        let shape = [positions.len(), self.head_dim()];
        (
            Tensor::from_data(TensorData::new(cos, shape), &self.device),
            Tensor::from_data(TensorData::new(sin, shape), &self.device),
        )
    }

    /// [`RopeTable::rows`] on the host, row-major.
    fn host_rows(&self, positions: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let half = self.inv_freq.len();
        let (mut cos, mut sin) = (vec![0.0; positions.len() * half * 2], vec![0.0; positions.len() * half * 2]);
        for (row, &position) in positions.iter().enumerate() {
            for channel in 0..half {
                let (c, s) = match self.cos.get(position * half + channel) {
                    Some(&c) => (c, self.sin[position * half + channel]),
                    None => self.at(position, channel),
                };
                let first = row * half * 2 + channel;
                (cos[first], cos[first + half]) = (c, c);
                (sin[first], sin[first + half]) = (-s, s);
            }
        }
        (cos, sin)
    }

    /// Cosine and sine of one channel. The angle is a float32 product, as in transformers, so that states agree.
    fn at(&self, position: usize, channel: usize) -> (f32, f32) {
        let angle = f64::from(position as f32 * self.inv_freq[channel]);
        (angle.cos() as f32 * self.attention_factor, angle.sin() as f32 * self.attention_factor)
    }

    /// Rotates `x [T, heads, head_dim]`, whose row `i` stands at `positions[i]`.
    pub fn apply(&self, x: Tensor<3>, positions: &[usize]) -> Tensor<3> {
        let (cos, sin) = self.rows(positions);
        rotate(x, cos, sin)
    }
}

/// Rotates the two halves of each head of `x [T, heads, head_dim]` by the rows `cos` and `sin` `[T, head_dim]` that
/// [`RopeTable::rows`] gave. Differentiable in `x`.
pub fn rotate(x: Tensor<3>, cos: Tensor<2>, sin: Tensor<2>) -> Tensor<3> {
    let half = x.dims()[2] / 2;
    let swapped = Tensor::cat(vec![x.clone().narrow(2, half, half), x.clone().narrow(2, 0, half)], 2);
    x * cos.unsqueeze_dim::<3>(1) + swapped * sin.unsqueeze_dim::<3>(1)
}

/// One frequency for each channel pair, scaled as the checkpoint asks.
pub(super) fn inverse_frequencies(rope: &Rope, head_dim: usize) -> Vec<f64> {
    let plain: Vec<f64> = (0..head_dim / 2).map(|i| rope.theta.powf(-((2 * i) as f64) / head_dim as f64)).collect();
    match &rope.scaling {
        RopeScaling::None => plain,
        // Position interpolation, arXiv 2306.15595.
        RopeScaling::Linear { factor } => plain.into_iter().map(|f| f / factor).collect(),
        // Llama 3.1: `apply_scaling` in meta-llama/llama-models, `_compute_llama3_parameters` in transformers.
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
            let original = *original_max_position as f64;
            let scale = |f: f64| {
                let wavelength = 2.0 * PI / f;
                if wavelength > original / low_freq_factor {
                    f / factor
                } else if wavelength < original / high_freq_factor {
                    f
                } else {
                    let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            };
            plain.into_iter().map(scale).collect()
        }
        // YaRN, arXiv 2309.00071 section 3.2; rounding and clamping as `_compute_yarn_parameters` in transformers.
        RopeScaling::Yarn { factor, original_max_position, beta_fast, beta_slow, .. } => {
            let correction = |rotations: f64| {
                head_dim as f64 * (*original_max_position as f64 / (rotations * 2.0 * PI)).ln()
                    / (2.0 * rope.theta.ln())
            };
            let low = correction(*beta_fast).floor().max(0.0);
            let high = correction(*beta_slow).ceil().min(head_dim as f64 - 1.0);
            let width = if low == high { 0.001 } else { high - low };
            let scale = |(i, f): (usize, f64)| {
                let ramp = ((i as f64 - low) / width).clamp(0.0, 1.0);
                f / factor * ramp + f * (1.0 - ramp)
            };
            plain.into_iter().enumerate().map(scale).collect()
        }
    }
}

/// What YaRN multiplies cosines and sines by: `0.1 ln(factor) + 1` (arXiv 2309.00071, eq. 22), or the ratio of the two
/// `mscale`s where DeepSeek-style configs give both; 1 for the other scalings.
fn attention_factor(scaling: &RopeScaling) -> f64 {
    let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = scaling else { return 1.0 };
    let scale = |mscale: f64| if *factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    match (attention_factor, mscale, mscale_all_dim) {
        (Some(given), ..) => *given,
        (None, Some(mscale), Some(all)) if *mscale != 0.0 && *all != 0.0 => scale(*mscale) / scale(*all),
        _ => scale(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope { theta: 10_000.0, scaling }
    }

    fn yarn(attention_factor: Option<f64>, mscale: Option<f64>, mscale_all_dim: Option<f64>) -> RopeScaling {
        RopeScaling::Yarn {
            factor: 4.0,
            original_max_position: 32,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor,
            mscale,
            mscale_all_dim,
        }
    }

    #[test]
    fn frequencies_match_the_published_formulas() {
        let close = |scaling, want: [f64; 4]| {
            let got = inverse_frequencies(&rope(scaling), 8);
            for (g, w) in got.iter().zip(want) {
                assert!((g - w).abs() < 1e-9, "{got:?} is not {want:?}");
            }
        };
        close(RopeScaling::None, [1.0, 0.1, 0.01, 0.001]);
        close(RopeScaling::Linear { factor: 2.0 }, [0.5, 0.05, 0.005, 0.0005]);
        // Wavelengths 6.3, 62.8, 628, 6283 against 100/4 and 100/1: kept, mixed (smooth = 0.197183), divided twice.
        let smooth = (100.0 / (20.0 * PI) - 1.0) / 3.0;
        close(
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position: 100,
            },
            [1.0, (1.0 - smooth) * 0.1 / 8.0 + smooth * 0.1, 0.01 / 8.0, 0.001 / 8.0],
        );
        // Correction range: floor(-0.8) clamped to 0, ceil(0.71) = 1.
        close(yarn(None, None, None), [1.0, 0.1 / 4.0, 0.01 / 4.0, 0.001 / 4.0]);
    }

    #[test]
    fn yarn_scales_attention() {
        assert_eq!(attention_factor(&RopeScaling::None), 1.0);
        assert_eq!(attention_factor(&yarn(Some(1.5), None, None)), 1.5);
        assert_eq!(attention_factor(&yarn(None, None, None)), 0.1 * 4f64.ln() + 1.0);
        assert_eq!(attention_factor(&yarn(None, Some(1.0), Some(1.0))), 1.0);
    }

    #[test]
    fn rotation_turns_pairs_by_their_angle_and_goes_on_beyond_the_table() {
        let device = Device::flex();
        let table = RopeTable::new(&rope(RopeScaling::None), 4, 8, &device);
        let x = Tensor::<3>::from_data([[[1.0f32, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]], &device);
        let positions = [3, 1000];
        let got: Vec<f32> = table.apply(x, &positions).into_data().try_into_vec().unwrap();
        for (row, position) in positions.into_iter().enumerate() {
            for (pair, frequency) in [1.0f32, 0.01].into_iter().enumerate() {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                let (a, b) = (1.0 + pair as f32, 3.0 + pair as f32);
                assert!((got[row * 4 + pair] - (a * cos - b * sin)).abs() < 1e-5);
                assert!((got[row * 4 + pair + 2] - (b * cos + a * sin)).abs() < 1e-5);
            }
        }
    }
}
