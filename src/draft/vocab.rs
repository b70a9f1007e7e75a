pub struct DraftVocab; impl DraftVocab { pub fn to_target(&self, i: u32) -> u32 { i } }
