-- The outbox in MySQL 8.0.13 or MariaDB 10.6, or later, with InnoDB. `usher streamer --migrate` applies it; DELIMITER is of the program
-- `mysql`, which takes this file as it is. MySQL commits after each statement, so each may be run again after one that failed.
--
-- Making the trigger needs the right TRIGGER, in MySQL with a binary log also SUPER, or log_bin_trust_function_creators = 1 on the server.
-- An application that is not the tables' owner needs one right: GRANT INSERT ON shop.staged_log_records TO app;

-- What an application writes in its own transaction.
CREATE TABLE IF NOT EXISTS staged_log_records (
    id         BIGINT PRIMARY KEY DEFAULT 0,                         -- 0: the trigger gives one
    uid        LONGTEXT NOT NULL DEFAULT (uuid()),                   -- the message's uid: the same for every repeat
    ticket_id  LONGTEXT NOT NULL,                                    -- records of one ticket stay in order
    action     LONGTEXT NOT NULL,                                    -- what happened: create, update ...
    object     LONGTEXT NOT NULL,                                    -- to what: ride, invoice ...
    data       LONGTEXT NOT NULL DEFAULT ('{}'),                     -- JSON
    created_at DATETIME(6) NOT NULL DEFAULT (utc_timestamp(6)),
    size       BIGINT NOT NULL DEFAULT 0                             -- bytes of uid, ticket, action, object and data: by the trigger
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Locks, one for all tickets with the same hash. Nothing changes these rows: under innodb_snapshot_isolation a changed one would end each
-- transaction that began before the change.
CREATE TABLE IF NOT EXISTS usher_outbox_locks (lock_id INT PRIMARY KEY) ENGINE = InnoDB;
INSERT IGNORE INTO usher_outbox_locks (lock_id)
WITH RECURSIVE digit (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM digit WHERE n < 15)
SELECT a.n + 16 * b.n + 256 * c.n + 4096 * d.n FROM digit AS a, digit AS b, digit AS c, digit AS d WHERE d.n < 4;

-- Gives ids, and stays empty.
CREATE TABLE IF NOT EXISTS usher_outbox_ids (id BIGINT AUTO_INCREMENT PRIMARY KEY) ENGINE = InnoDB;

-- Ids are given out before the commit, so id order is not commit order. For the rows of one ticket it is made so: who writes one waits
-- until every transaction that has written an earlier one is over, and takes its id only then. (An AUTO_INCREMENT of the table itself
-- would be given out for all rows of a statement at its first.) Two transactions that write the same two tickets in opposite order end
-- in InnoDB's deadlock error, and so do two that change a row and write its record in opposite order: write tickets in one order, as you
-- would update rows, and each record behind the change that it tells of. A row that the streamers would refuse for its size (rows.py:
-- ROW_BYTES) fails where it is written.
DROP TRIGGER IF EXISTS usher_outbox_in_order;
DELIMITER //
CREATE TRIGGER usher_outbox_in_order BEFORE INSERT ON staged_log_records FOR EACH ROW
BEGIN
    DECLARE held INT;
    SET NEW.size = octet_length(NEW.uid) + octet_length(NEW.ticket_id) + octet_length(NEW.action) + octet_length(NEW.object)
                   + octet_length(NEW.data);
    IF NEW.size > 1024 * 16384 THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'this row of the outbox is too large to become a message: more than 16384 KiB';
    END IF;
    IF NEW.id = 0 THEN
        SELECT lock_id INTO held FROM usher_outbox_locks WHERE lock_id = crc32(NEW.ticket_id) & 16383 FOR UPDATE;
        IF held IS NULL AND NEW.ticket_id IS NOT NULL THEN -- without the lock there would be no order
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'usher_outbox_locks lacks rows: run its INSERT of schema_mysql.sql again';
        END IF;
        INSERT INTO usher_outbox_ids () VALUES ();
        SET NEW.id = last_insert_id();
        DELETE FROM usher_outbox_ids WHERE id = NEW.id;
    END IF;
END //
DELIMITER ;

-- Rows that can become no message, with the reason. They wait here for somebody; queries.sql says how to put one back. `halts`: the later
-- rows of its ticket wait in the outbox until it is put back or deleted (USHER_OUTBOX_REFUSED_POLICY=halt).
CREATE TABLE IF NOT EXISTS refused_log_records (
    id         BIGINT PRIMARY KEY,
    uid        LONGTEXT,
    ticket_id  LONGTEXT,
    action     LONGTEXT,
    object     LONGTEXT,
    data       LONGTEXT,
    created_at DATETIME(6),
    reason     LONGTEXT NOT NULL,
    refused_at DATETIME(6) NOT NULL DEFAULT (utc_timestamp(6)),
    halts      BOOLEAN NOT NULL DEFAULT false,
    INDEX refused_log_records_halts (halts, ticket_id(64))
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- How far each log consumer is: the last entry whose effects are stored. `version` counts its commits, `records` what it handled.
-- Bytes, here and below: for MySQL 'a' and 'a ' are the same text.
CREATE TABLE IF NOT EXISTS checkpoints (
    name       VARBINARY(255) NOT NULL,
    stream     VARBINARY(512) NOT NULL,
    last_id    VARCHAR(64) NOT NULL,
    version    BIGINT NOT NULL DEFAULT 0,
    records    BIGINT NOT NULL DEFAULT 0,
    updated_at DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (name, stream)
) ENGINE = InnoDB CHARACTER SET utf8mb4;

-- What a log consumer remembers from one batch to the next, as JSON: a running total, for example.
CREATE TABLE IF NOT EXISTS consumer_states (
    name   VARBINARY(255) NOT NULL,
    stream VARBINARY(512) NOT NULL,
    state  LONGTEXT NOT NULL,
    PRIMARY KEY (name, stream)
) ENGINE = InnoDB CHARACTER SET utf8mb4;

-- The uids of the last records of each log consumer, by which it knows a record that was sent twice.
CREATE TABLE IF NOT EXISTS consumer_uids (
    name   VARBINARY(255) NOT NULL,
    stream VARBINARY(512) NOT NULL,
    uid    VARBINARY(1024) NOT NULL,
    number BIGINT NOT NULL,                                          -- checkpoints.records when it was handled
    PRIMARY KEY (name, stream, uid),
    INDEX consumer_uids_number (name, stream, number)
) ENGINE = InnoDB;

-- The last statement: all of the others are done.
CREATE TABLE IF NOT EXISTS usher_outbox_version (version INT PRIMARY KEY) ENGINE = InnoDB;
INSERT IGNORE INTO usher_outbox_version (version) VALUES (1);
