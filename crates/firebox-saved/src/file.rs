//! The file of a saved trace: a header, and the trace, compressed.
//!
//! The header is the text `firebox trace`, a zero byte, the format's number, the length of what
//! follows the hash, and its BLAKE3 hash. What it says is verified before anything is unpacked.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;

use crate::error::LoadError;
use crate::saved::SavedTrace;

/// How a saved trace begins.
const MAGIC: &[u8; 14] = b"firebox trace\0";

/// The number of this format.
const FORMAT: u32 = 3;

/// The length of the header: magic, format, length, hash.
const HEADER: usize = MAGIC.len() + size_of::<u32>() + size_of::<u64>() + blake3::OUT_LEN;

/// The most bytes of an unpacked trace. In memory it takes up to twenty times as many.
const MOST_UNPACKED: usize = 1 << 26;

impl SavedTrace {
    /// The bytes of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let unpacked = bincode::serde::encode_to_vec(self, bincode::config::standard());
        let packed = pack(&unpacked.expect("plain data can be encoded"));
        let packed = packed.expect("a vector takes all bytes");
        let mut bytes = Vec::with_capacity(HEADER + packed.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&FORMAT.to_le_bytes());
        bytes.extend_from_slice(&(packed.len() as u64).to_le_bytes());
        bytes.extend_from_slice(blake3::hash(&packed).as_bytes());
        bytes.extend_from_slice(&packed);
        bytes
    }

    /// Reads the bytes of a file.
    ///
    /// Takes at most a bounded amount of memory, whatever the bytes are.
    ///
    /// # Errors
    ///
    /// If they are not the bytes of a saved trace, or of one in another format.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, LoadError> {
        let (magic, rest) = bytes.split_at_checked(MAGIC.len()).ok_or(LoadError::Foreign)?;
        if magic != MAGIC {
            return Err(LoadError::Foreign);
        }
        let short = || LoadError::Truncated { found: bytes.len() as u64, expected: HEADER as u64 };
        let (format, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let format = u32::from_le_bytes(*format);
        if format != FORMAT {
            return Err(LoadError::OtherFormat { found: format, known: FORMAT });
        }
        let (length, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let length = u64::from_le_bytes(*length);
        let (hash, packed) = rest.split_first_chunk().ok_or_else(short)?;
        if (packed.len() as u64) < length {
            let expected = length.saturating_add(HEADER as u64);
            return Err(LoadError::Truncated { found: bytes.len() as u64, expected });
        }
        if packed.len() as u64 != length || blake3::hash(packed) != blake3::Hash::from_bytes(*hash)
        {
            return Err(LoadError::Damaged);
        }
        let contradiction = |why: String| LoadError::Contradiction(why);
        let unpacked = unpack(packed).map_err(|error| contradiction(error.to_string()))?;
        let config = bincode::config::standard().with_limit::<MOST_UNPACKED>();
        let (trace, read) = bincode::serde::decode_from_slice::<Self, _>(&unpacked, config)
            .map_err(|error| contradiction(error.to_string()))?;
        if read != unpacked.len() {
            return Err(contradiction("something follows its end".into()));
        }
        match trace.has_sound_sizes() {
            true => Ok(trace),
            false => Err(contradiction("a size is larger than any batch".into())),
        }
    }

    /// Writes the file. It replaces a file of that name once it is whole.
    ///
    /// # Errors
    ///
    /// If it cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut builder = tempfile::Builder::new();
        // As the user's other files, not as those that are for the owner alone.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = builder.tempfile_in(folder.unwrap_or(Path::new(".")))?;
        file.write_all(&self.to_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// If it cannot be read, or is no saved trace.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref();
        let unreadable = |cause| LoadError::Unreadable { path: path.to_owned(), cause };
        let mut bytes = Vec::new();
        let file = fs::File::open(path).map_err(unreadable)?;
        // A trace is smaller packed than unpacked.
        file.take(MOST_UNPACKED as u64).read_to_end(&mut bytes).map_err(unreadable)?;
        Self::from_bytes(&bytes)
    }
}

fn pack(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes)?;
    encoder.finish()
}

fn unpack(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let decoder = DeflateDecoder::new(bytes);
    let mut unpacked = Vec::new();
    decoder.take(MOST_UNPACKED as u64 + 1).read_to_end(&mut unpacked)?;
    match unpacked.len() {
        0..=MOST_UNPACKED => Ok(unpacked),
        _ => Err(io::Error::other("it is larger than any trace")),
    }
}

#[cfg(test)]
mod tests {
    use firebox_plan::{Run, Split};

    use super::*;
    use crate::saved::tests::saved;

    /// A generator of numbers (Marsaglia's xorshift, 2003).
    struct Numbers(u64);

    impl Numbers {
        fn next(&mut self, below: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 as usize % below
        }
    }

    /// Changes up to four bytes, or cuts bytes out, or puts some in.
    fn mutate(bytes: &mut Vec<u8>, numbers: &mut Numbers) {
        for _ in 0..=numbers.next(4) {
            let at = numbers.next(bytes.len().max(1));
            match numbers.next(8) {
                0 => bytes.truncate(at),
                1 => drop(bytes.drain(at..(at + numbers.next(9)).min(bytes.len()))),
                2 => bytes.insert(at.min(bytes.len()), numbers.next(256) as u8),
                3 if at < bytes.len() => bytes[at] = [0, 1, 127, 250, 251, 252, 253, 255][at % 8],
                _ if at < bytes.len() => bytes[at] ^= 1 << numbers.next(8),
                _ => {}
            }
        }
    }

    /// The file of an unpacked trace, with the right hash.
    fn file(unpacked: &[u8]) -> Vec<u8> {
        let packed = pack(unpacked).expect("a vector takes all bytes");
        let hash = blake3::hash(&packed);
        let length = (packed.len() as u64).to_le_bytes();
        [&MAGIC[..], &FORMAT.to_le_bytes(), &length, hash.as_bytes(), &packed].concat()
    }

    /// Reads changed files of every kind, and makes traces of what can be read.
    fn read_changed(count: usize) {
        let trace = saved(12, |_| 3).expect("it follows rules");
        let whole = trace.to_bytes();
        let unpacked = unpack(&whole[HEADER..]).expect("it was just packed");
        assert_eq!(SavedTrace::from_bytes(&file(&unpacked)).expect("nothing changed"), trace);
        let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
        let mut readable = 0;
        for round in 0..count {
            // One in eight is changed where the hash shows it.
            let bytes = match round % 8 {
                0 => {
                    let mut bytes = whole.clone();
                    mutate(&mut bytes, &mut numbers);
                    bytes
                }
                _ => {
                    let mut bytes = unpacked.clone();
                    mutate(&mut bytes, &mut numbers);
                    file(&bytes)
                }
            };
            let Ok(trace) = SavedTrace::from_bytes(&bytes) else { continue };
            readable += 1;
            let run = |count, size| Run { count, size };
            for split in [Split::whole(5), Split::new(run(2, 3), Some(run(1, 1)))] {
                if let Ok(sample) = trace.sample(split) {
                    assert_eq!(sample.trace.check(), Ok(()));
                }
            }
        }
        println!("{readable} of {count} changed files are read");
        assert!(readable > count / 100, "the changes are too coarse to test anything");
    }

    #[test]
    fn changed_files_are_errors_or_traces() {
        read_changed(4_000);
    }

    #[test]
    #[ignore = "takes minutes: `cargo test --release -p firebox-saved -- --ignored`"]
    fn a_million_changed_files_are_errors_or_traces() {
        read_changed(1_000_000);
    }
}
