//! Transfers between devices: data from the sender waits on the host until the receiver fetches it.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use cubecl::ir::ElemType;
use cubecl_common::bytes::Bytes;
use cubecl_common::device::DeviceId;
use cubecl_common::future::block_on;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::{
    ComputeServer, CopyDescriptor, Handle, ServerCommunication, ServerError,
};
use parking_lot::{Condvar, Mutex};

use crate::refusal::error;
use crate::server::PoolServer;

/// How long a receiver waits. The sender may have work to finish first; one thread requests both
/// sides at the same time.
const PATIENCE: Duration = Duration::from_secs(600);

/// The sending device, the receiving device, and the thread that requested the transfer.
type Way = (DeviceId, DeviceId, StreamId);

/// The transfers on one way: data sent, or the error of reading it, and how many upcoming sends no
/// receiver waits for any more.
#[derive(Default)]
struct Letters {
    sent: VecDeque<Result<Bytes, ServerError>>,
    given_up: usize,
}

static MAIL: Mutex<Option<HashMap<Way, Letters>>> = Mutex::new(None);
static ARRIVED: Condvar = Condvar::new();

impl<R: Runtime> ServerCommunication for PoolServer<R> {
    const SERVER_COMM_ENABLED: bool = true;

    fn comm_init(&mut self, _devices: Vec<DeviceId>) -> Result<(), ServerError> {
        Ok(())
    }

    fn sync_collective(&mut self, _stream: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn send(
        &mut self,
        copy: CopyDescriptor,
        _dtype: ElemType,
        stream: StreamId,
        to: DeviceId,
    ) -> Result<(), ServerError> {
        let size = copy.handle.size_in_used() as usize;
        let flat = CopyDescriptor {
            handle: copy.handle,
            shape: [size].into(),
            strides: [1].into(),
            elem_size: 1,
        };
        // A read error goes to the receiving device. There it fails whatever uses the bytes.
        let bytes = block_on(self.read(vec![flat], stream)).map(|mut bytes| bytes.remove(0));
        let mut mail = MAIL.lock();
        let letters = mail.get_or_insert_default().entry((self.device(), to, stream)).or_default();
        match letters.given_up.checked_sub(1) {
            Some(left) => letters.given_up = left,
            None => letters.sent.push_back(bytes),
        }
        ARRIVED.notify_all();
        Ok(())
    }

    fn recv(
        &mut self,
        handle: Handle,
        _dtype: ElemType,
        stream: StreamId,
        from: DeviceId,
    ) -> Result<(), ServerError> {
        let size = handle.size();
        self.initialize_memory(handle.memory.clone(), size, stream);
        let way = (from, self.device(), stream);
        let until = Instant::now() + PATIENCE;
        let mut mail = MAIL.lock();
        let bytes = loop {
            let letters = mail.get_or_insert_default().entry(way).or_default();
            if let Some(bytes) = letters.sent.pop_front() {
                if letters.sent.is_empty() {
                    // Removed when empty: threads come and go, and each has an entry.
                    mail.get_or_insert_default().remove(&way);
                }
                break bytes?;
            }
            if Instant::now() >= until {
                letters.given_up += 1;
                return Err(error(format!("{from} did not send what {} waits for", way.1)));
            }
            ARRIVED.wait_until(&mut mail, until);
        };
        drop(mail);
        if bytes.len() as u64 != size {
            return Err(error(format!("{from} sent {} bytes in place of {size}", bytes.len())));
        }
        let flat = CopyDescriptor {
            handle: handle.binding(),
            shape: [size as usize].into(),
            strides: [1].into(),
            elem_size: 1,
        };
        self.write(vec![(flat, bytes)], stream);
        Ok(())
    }
}
