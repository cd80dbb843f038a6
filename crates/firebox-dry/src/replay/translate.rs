//! Translates descriptions of calls into a replay's terms: its tensor numbers and its target's
//! element types.
//!
//! A [`Description`](firebox_trace::Description) has its own tensor numbers, so that calls can
//! share it, and the element types of the backend that recorded it. burn-ir offers no way to walk
//! the tensors of an operation and change them, but its operations can be serialized. They are
//! serialized twice: once for each description into a tree, in which element types change; then
//! into bytes with fixed places, from which each call decodes operations with numbers of its own.
//! `program.rs` holds one [`Template`] for each description.

use bincode::config::{Configuration, Fixint, LittleEndian};
use burn_ir::{OperationIr, TensorId};
use burn_std::{BoolStore, DType};
use ciborium::Value;
use firebox_trace::{Bytes, TensorInfo};
use serde::Serialize;

/// Maps element types of a recording to those of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Types {
    /// How the target stores booleans.
    pub(crate) bools: BoolStore,
    /// Types of a recording, and what the target has instead.
    pub(crate) instead: Vec<(DType, DType)>,
}

impl Types {
    /// The element type of the target.
    pub(crate) fn translate(&self, dtype: DType) -> DType {
        let instead = self.instead.iter().find(|(from, _)| *from == dtype);
        match (dtype, instead) {
            (DType::Bool(_), _) => DType::Bool(self.bools),
            (_, Some((_, to))) => *to,
            (dtype, None) => dtype,
        }
    }

    /// The size of a tensor's elements on the target.
    pub(crate) fn bytes(&self, tensor: &TensorInfo) -> Bytes {
        Bytes::of_elements(&tensor.shape, self.translate(tensor.dtype))
    }
}

/// The operations of a description, ready to be numbered.
pub(crate) struct Template {
    operations: Vec<Encoded>,
}

/// An operation as bytes, with the places of its tensor numbers and the number each tensor has in
/// the description. The numbers in the bytes are those of the latest call.
struct Encoded {
    bytes: Vec<u8>,
    tensors: Vec<(usize, TensorId)>,
}

/// Encodes numbers with a fixed size, so that they can be overwritten.
const ENCODING: Configuration<LittleEndian, Fixint> =
    bincode::config::standard().with_fixed_int_encoding();

/// Added to the numbers of a description to find them among bytes: nothing else looks like that.
const BEACON: u64 = 0x9e37_79b9_7f4a_0000;

impl Template {
    pub(crate) fn new(operations: &[OperationIr], types: &Types) -> Self {
        let encode = |operation| {
            let mut tree = tree(operation);
            translate(&mut tree, types);
            let mut count = 0;
            each_tensor(&mut tree, &mut |id| {
                let number: TensorId = id.deserialized().expect("a tensor has an id");
                assert!(number.value() < 1 << 16, "a description has fewer tensors");
                *id = self::tree(&TensorId::new(BEACON + number.value()));
                count += 1;
            });
            let operation: OperationIr =
                tree.deserialized().expect("what was serialized can be read");
            let encoded = Encoded::new(&operation);
            assert_eq!(encoded.tensors.len(), count, "every tensor of {operation:?} is found");
            encoded
        };
        Self { operations: operations.iter().map(encode).collect() }
    }

    /// The operations with tensor `id` renamed to `number(id)`.
    pub(crate) fn number(
        &mut self,
        mut number: impl FnMut(TensorId) -> TensorId,
    ) -> impl Iterator<Item = OperationIr> {
        self.operations.iter_mut().map(move |Encoded { bytes, tensors }| {
            for (at, tensor) in tensors {
                bytes[*at..*at + size_of::<u64>()]
                    .copy_from_slice(&number(*tensor).value().to_le_bytes());
            }
            let decoded = bincode::serde::decode_from_slice(bytes, ENCODING);
            decoded.expect("what was encoded can be decoded").0
        })
    }
}

impl Encoded {
    /// Encodes an operation whose tensor numbers start at [`BEACON`].
    fn new(operation: &OperationIr) -> Self {
        let bytes = bincode::serde::encode_to_vec(operation, ENCODING)
            .expect("burn-ir's operations can be encoded");
        let number = |(at, word): (usize, &[u8])| {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            let number = word.checked_sub(BEACON).filter(|number| *number < 1 << 16);
            number.map(|number| (at, TensorId::new(number)))
        };
        let tensors = bytes.windows(size_of::<u64>()).enumerate().filter_map(number).collect();
        Self { bytes, tensors }
    }
}

/// A value as a tree. Unlike JSON, the tree keeps infinite scalars.
fn tree(value: &impl Serialize) -> Value {
    Value::serialized(value).expect("burn-ir's operations serialize")
}

fn translate(tree: &mut Value, types: &Types) {
    match tree {
        Value::Text(_) => {
            if let Some((_, to)) = types.instead.iter().find(|(from, _)| *tree == self::tree(from))
            {
                *tree = self::tree(to);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| translate(item, types)),
        Value::Map(fields) => {
            if let [(Value::Text(key), value)] = &mut fields[..]
                && key == "Bool"
                && value.is_text()
            {
                *value = self::tree(&types.bools);
            }
            fields.iter_mut().for_each(|(_, value)| translate(value, types));
        }
        _ => {}
    }
}

/// Calls `visit` with the number of every tensor.
fn each_tensor(tree: &mut Value, visit: &mut impl FnMut(&mut Value)) {
    match tree {
        Value::Array(items) => items.iter_mut().for_each(|item| each_tensor(item, visit)),
        Value::Map(fields) => {
            let at = |name: &str| fields.iter().position(|(key, _)| key.as_text() == Some(name));
            let is_tensor = ["shape", "status", "dtype"].iter().all(|name| at(name).is_some());
            match at("id") {
                Some(id) if is_tensor => visit(&mut fields[id].1),
                _ => fields.iter_mut().for_each(|(_, value)| each_tensor(value, visit)),
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_ir::{
        BaseOperationIr, CastOpIr, FloatOperationIr, MaskFillOpIr, ScalarIr, TensorIr, TensorStatus,
    };

    fn gpu() -> Types {
        Types { bools: BoolStore::U8, instead: vec![(DType::I64, DType::I32)] }
    }

    fn tensor(id: u64, dtype: DType) -> TensorIr {
        let status = TensorStatus::ReadOnly;
        TensorIr { id: TensorId::new(id), shape: [2, 3].into(), status, dtype }
    }

    fn translated(operation: OperationIr, types: &Types) -> OperationIr {
        let mut template = Template::new(&[operation], types);
        let mut operations = template.number(|id| TensorId::new(id.value() + 100));
        operations.next().expect("one operation")
    }

    #[test]
    fn numbers_and_types_are_the_targets() {
        let bools = DType::Bool(BoolStore::Native);
        let operation = OperationIr::BaseFloat(BaseOperationIr::MaskFill(MaskFillOpIr {
            tensor: tensor(0, DType::F32),
            mask: tensor(1, bools),
            value: ScalarIr::Float(-2.5),
            out: tensor(2, DType::F32),
        }));
        let expected = OperationIr::BaseFloat(BaseOperationIr::MaskFill(MaskFillOpIr {
            tensor: tensor(100, DType::F32),
            mask: tensor(101, DType::Bool(BoolStore::U8)),
            value: ScalarIr::Float(-2.5),
            out: tensor(102, DType::F32),
        }));
        assert_eq!(translated(operation, &gpu()), expected);
    }

    #[test]
    fn integers_change_only_where_the_default_does() {
        let cast = |from, to| {
            let (input, out) = (tensor(0, from), tensor(1, to));
            OperationIr::Float(DType::F32, FloatOperationIr::IntoInt(CastOpIr { input, out }))
        };
        let out = |types: &Types| {
            let operation = translated(cast(DType::F32, DType::I64), types);
            operation.outputs().next().expect("an output").dtype
        };
        assert_eq!(out(&gpu()), DType::I32);
        assert_eq!(out(&Types { instead: Vec::new(), ..gpu() }), DType::I64);
    }

    #[test]
    fn an_infinite_scalar_stays_what_it_is() {
        let value = ScalarIr::Float(f64::NEG_INFINITY);
        let operation = OperationIr::BaseFloat(BaseOperationIr::MaskFill(MaskFillOpIr {
            tensor: tensor(0, DType::F32),
            mask: tensor(1, DType::Bool(BoolStore::U8)),
            value,
            out: tensor(2, DType::F32),
        }));
        match translated(operation, &gpu()) {
            OperationIr::BaseFloat(BaseOperationIr::MaskFill(fill)) => {
                assert_eq!(fill.value, value)
            }
            other => panic!("{other:?}"),
        }
    }
}
