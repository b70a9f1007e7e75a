//! Acceptance from teacher-forced hits: what a chain of drafts would have kept.

use super::ttt::Layout;

/// Per TTT step how many counted rows there were, how many the draft hit, and how many whole chains held.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct ChainCounts {
    /// Rows compared at step k.
    pub rows: Vec<usize>,
    /// Rows where the draft's token at step k is the target's.
    pub hits: Vec<usize>,
    /// Rows whose steps 0..=k can all be compared.
    pub chains: Vec<usize>,
    /// Those where all of them hit.
    pub held: Vec<usize>,
}

impl ChainCounts {
    /// For `steps` TTT steps.
    pub fn new(steps: usize) -> Self {
        Self { rows: vec![0; steps], hits: vec![0; steps], chains: vec![0; steps], held: vec![0; steps] }
    }

    /// Adds one batch. `hit(k, i)` tells whether the i-th counted row of step k was right.
    pub fn add(&mut self, layout: &Layout, hit: impl Fn(usize, usize) -> bool) {
        // None: not comparable from the start of the chain to here.
        let mut chain: Vec<Option<bool>> = vec![Some(true); layout.queries.len()];
        for (k, counted) in layout.counted.iter().enumerate() {
            let mut next = vec![None; chain.len()];
            for (i, &row) in counted.rows.iter().enumerate() {
                let right = hit(k, i);
                self.rows[k] += 1;
                self.hits[k] += usize::from(right);
                if let Some(held) = chain[row] {
                    self.chains[k] += 1;
                    self.held[k] += usize::from(held && right);
                    next[row] = Some(held && right);
                }
            }
            chain = next;
        }
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Self) {
        let add = |a: &mut Vec<usize>, b: &[usize]| a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        add(&mut self.rows, &other.rows);
        add(&mut self.hits, &other.hits);
        add(&mut self.chains, &other.chains);
        add(&mut self.held, &other.held);
    }

    /// Share of rows hit at each step.
    pub fn accuracy(&self) -> Vec<f64> {
        share(&self.hits, &self.rows)
    }

    /// Share of hits at step k among rows whose earlier steps all hit.
    pub fn conditional_accuracy(&self) -> Vec<f64> {
        let chain = self.chain_accuracy();
        let before = std::iter::once(1.0).chain(chain.iter().copied());
        chain.iter().zip(before).map(|(now, before)| if before > 0.0 { now / before } else { 0.0 }).collect()
    }

    /// Share of chains that hold up to and with step k.
    pub fn chain_accuracy(&self) -> Vec<f64> {
        share(&self.held, &self.chains)
    }

    /// Tokens a verification that chains of `k` drafts imply, the bonus token counted:
    /// `1 + sum over j < k of P(steps 0..=j all hit)`, positions kept together rather than averaged apart.
    pub fn acceptance_length(&self, k: usize) -> f64 {
        1.0 + self.chain_accuracy().iter().take(k).sum::<f64>()
    }
}

fn share(part: &[usize], whole: &[usize]) -> Vec<f64> {
    part.iter().zip(whole).map(|(&p, &w)| if w == 0 { 0.0 } else { p as f64 / w as f64 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_keep_positions_together() {
        // Rows hit at step 0: all even ones; at step 1: all odd ones. Averages say 1/4 of chains hold, truth says none.
        let ids: Vec<u32> = (0..10).collect();
        let mask = vec![true; 10];
        let layout = Layout::new(&[(&ids, &mask)], 2);
        let mut counts = ChainCounts::new(2);
        counts.add(&layout, |k, i| layout.counted[k].rows[i] % 2 == k);
        assert_eq!(counts.held[1], 0);
        assert!((counts.acceptance_length(2) - (1.0 + 5.0 / 9.0)).abs() < 1e-9);
        assert!(counts.accuracy()[1] > 0.4);
    }
}
