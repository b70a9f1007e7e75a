//! What is llama.cpp's own in a GGUF file: its tensor names, its order of q and k rows, and a header that must be
//! checked before a reader trusts its lengths.

use std::io::Read;

use super::HostTensor;

/// The GGUF name of a Hugging Face tensor name.
pub(super) fn stored_name(name: &str) -> Option<String> {
    match name {
        "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
        "model.norm.weight" => return Some("output_norm.weight".into()),
        "lm_head.weight" => return Some("output.weight".into()),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let stored = match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => return None,
    };
    Some(format!("blk.{layer}.{stored}.{kind}"))
}

/// Rows of each head from `(pair, half)` order, as llama.cpp stores them, to `(half, pair)`, as rotate-half RoPE
/// wants them. A weight is `[heads * head_dim, in]`, a bias `[heads * head_dim]`.
pub(super) fn uninterleave(tensor: HostTensor, heads: usize) -> HostTensor {
    let rows = tensor.shape[0];
    let width = tensor.data.len() / rows;
    let head_dim = rows / heads;
    let mut data = Vec::with_capacity(tensor.data.len());
    for head in 0..heads {
        for half in 0..2 {
            for pair in 0..head_dim / 2 {
                let row = head * head_dim + pair * 2 + half;
                data.extend_from_slice(&tensor.data[row * width..(row + 1) * width]);
            }
        }
    }
    HostTensor { shape: tensor.shape, data }
}

/// Walks a header without keeping it. The library's reader allocates what a length says, so every length is first
/// held against the size of the file.
///
/// # Errors
/// Says what is wrong with the header.
pub(super) fn check_header(reader: &mut impl Read, file_length: u64) -> Result<(), String> {
    let mut walk = Walk { reader, left: file_length };
    let magic: [u8; 4] = walk.take()?;
    if &magic != b"GGUF" {
        return Err("not a GGUF file (a Hugging Face folder is given as a folder)".into());
    }
    let version = u32::from_le_bytes(walk.take()?);
    if !(2..=3).contains(&version) {
        return Err(format!("GGUF version {version} is not supported, only 2 and 3"));
    }
    let tensors = walk.count("tensor count", 24)?;
    let keys = walk.count("key count", 13)?;
    for _ in 0..keys {
        walk.string("key")?;
        let kind = u32::from_le_bytes(walk.take()?);
        walk.value(kind)?;
    }
    for _ in 0..tensors {
        walk.string("tensor name")?;
        let rank = u32::from_le_bytes(walk.take()?);
        if rank > 4 {
            return Err(format!("a tensor of rank {rank}"));
        }
        let mut elements = 1u64;
        for _ in 0..rank {
            elements = elements.checked_mul(u64::from_le_bytes(walk.take()?)).ok_or("a tensor larger than memory")?;
        }
        // The smallest type stores a weight in a quarter byte.
        if elements / 4 > file_length {
            return Err("a tensor larger than the file".into());
        }
        walk.skip(12)?;
    }
    Ok(())
}

struct Walk<'a, R: Read> {
    reader: &'a mut R,
    left: u64,
}

impl<R: Read> Walk<'_, R> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes).map_err(|_| "the header is torn".to_string())?;
        self.left = self.left.saturating_sub(N as u64);
        Ok(bytes)
    }

    fn skip(&mut self, bytes: u64) -> Result<(), String> {
        if bytes > self.left {
            return Err("the header is torn: a length reaches behind the end of the file".into());
        }
        let copied = std::io::copy(&mut self.reader.by_ref().take(bytes), &mut std::io::sink());
        self.left -= bytes;
        if copied.is_ok_and(|n| n == bytes) { Ok(()) } else { Err("the header is torn".into()) }
    }

    /// A count of things that take at least `each` bytes.
    fn count(&mut self, what: &str, each: u64) -> Result<u64, String> {
        let count = u64::from_le_bytes(self.take()?);
        if count.saturating_mul(each) > self.left {
            return Err(format!("{what} {count} reaches behind the end of the file"));
        }
        Ok(count)
    }

    fn string(&mut self, what: &str) -> Result<(), String> {
        let length = self.count(what, 1)?;
        self.skip(length)
    }

    fn value(&mut self, kind: u32) -> Result<(), String> {
        match kind {
            8 => self.string("text"),
            9 => {
                let kind = u32::from_le_bytes(self.take()?);
                if kind == 9 {
                    return Err("a list of lists".into());
                }
                let size = width(kind)?;
                let count = self.count("list", size.unwrap_or(8))?;
                match size {
                    Some(size) => self.skip(count * size),
                    None => (0..count).try_for_each(|_| self.string("text")),
                }
            }
            kind => width(kind)?.map_or(Ok(()), |size| self.skip(size)),
        }
    }
}

/// Bytes of a plain value; `None` for text.
fn width(kind: u32) -> Result<Option<u64>, String> {
    match kind {
        0 | 1 | 7 => Ok(Some(1)),
        2 | 3 => Ok(Some(2)),
        4..=6 => Ok(Some(4)),
        10..=12 => Ok(Some(8)),
        8 => Ok(None),
        other => Err(format!("unknown value type {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rows_return_to_rotate_half_order() {
        // One head of width 4: stored (pair 0: a, b), (pair 1: a, b) becomes a, a, b, b.
        let tensor = HostTensor { shape: vec![4, 1], data: vec![0.0, 10.0, 1.0, 11.0] };
        assert_eq!(uninterleave(tensor, 1).data, [0.0, 1.0, 10.0, 11.0]);
    }

    #[test]
    fn names_are_llama_cpps() {
        assert_eq!(stored_name("model.layers.7.self_attn.o_proj.weight").unwrap(), "blk.7.attn_output.weight");
        assert_eq!(stored_name("model.layers.7.self_attn.q_proj.bias").unwrap(), "blk.7.attn_q.bias");
        assert_eq!(stored_name("visual.patch.weight"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut file = b"GGUF\x03\0\0\0".to_vec();
            file.extend(&bytes);
            let _ = check_header(&mut &file[..], file.len() as u64);
            let _ = check_header(&mut &bytes[..], bytes.len() as u64);
        }
    }
}
